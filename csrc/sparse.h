// Codecs that send some numbers only. Compiled once per instruction set.
#pragma once

#include <cstddef>

namespace pyps {

// A number of the wire contract.
enum class SparseCodec : int { threshold = 7, topk = 8, topk2bit = 9 };

struct SparseKernels {
  // Encodes a = feedback * residual + gradient, and writes what is not sent of it to `lost`, which
  // may be the residual. Without a residual a is the gradient; `lost` may be null. Returns the
  // bytes written; there is room for the most that the codec takes.
  std::size_t (*encode)(void* encoded, const float* gradient, const float* residual, float feedback,
                        float* lost, SparseCodec codec, double setting, std::size_t count);

  // Writes all numbers, those that were not sent as 0; returns false where the bytes, which may be
  // anything, are malformed.
  bool (*decode)(float* values, const void* encoded, std::size_t num_bytes, SparseCodec codec,
                 std::size_t count);
};

}  // namespace pyps
