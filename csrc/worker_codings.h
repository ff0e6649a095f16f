// What the library of workers computes. Compiled once per instruction set, and free functions as
// those of kernels.h.
#pragma once

#include "codecs.h"

namespace pyps {

// For codecs whose numbers share bytes. C(x) are the bytes of x, D(q) the numbers of q. Each is one
// pass over memory; `encoded` may begin at any byte.
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

// Codecs that send some numbers only, by their numbers in the wire contract.
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

struct WorkerCodings {
  CodecKernels blocks;
  SparseKernels sparse;
  // The numbers of the codecs that each of them takes; 0 ends them.
  const int* block_codecs;
  const int* sparse_codecs;
};

}  // namespace pyps
