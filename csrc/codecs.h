// How numbers are encoded on the wire, by servers and workers.
#pragma once

#include <cstddef>

namespace pyps {

// A number of the wire contract; kernel_codecs.h defines each.
enum class Codec : int { float32 = 1, float16 = 2, bfloat16 = 3, int8 = 4, int4 = 5, onebit = 6 };

struct CodecTraits {
  Codec codec;
  const char* name;
  std::size_t (*bytes_of)(std::size_t count);
  // Python's type of one number (bfloat16's bits are integers); 0 where there is none, since
  // numbers share bytes.
  char format;
};

}  // namespace pyps
