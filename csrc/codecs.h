// How numbers are encoded on the wire: what servers and workers both compute. Compiled once per
// instruction set, and free functions as those of kernels.h.
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

// The functions of one instruction set, for codecs whose numbers share bytes. C(x) are the bytes of
// x, D(q) the numbers of q. Each is one pass over memory; `encoded` may begin at any byte.
struct CodecKernels {
  void (*encode)(void* encoded, const float* values, Codec codec, std::size_t count);

  void (*decode)(float* values, const void* encoded, Codec codec, std::size_t count);

  // values = values + D(encoded)
  void (*add)(float* values, const void* encoded, Codec codec, std::size_t count);

  // a = feedback * residual + gradient; encoded = C(a); lost = a - D(encoded), which may be written
  // over the residual or the gradient.
  void (*encode_feedback)(void* encoded, const float* gradient, const float* residual,
                          float feedback, float* lost, Codec codec, std::size_t count);

  // encoded = C(values - held); held = held + D(encoded)
  void (*encode_difference)(void* encoded, const float* values, float* held, Codec codec,
                            std::size_t count);
};

}  // namespace pyps
