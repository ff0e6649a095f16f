// The workers' part of the kernels: compiled once per instruction set, as kernels.cpp.
#include "worker_codings.h"

#include "kernel_codecs.h"
#include "kernel_sparse.h"

namespace pyps {
namespace {

struct BlockCodecs {
  constexpr BlockCodecs() {
    int* next = numbers;
    for (const CodecTraits& codec : Codecs::traits) {
      if (codec.format == 0) *next++ = static_cast<int>(codec.codec);
    }
  }
  int numbers[sizeof Codecs::traits / sizeof *Codecs::traits + 1] = {};
};
constexpr BlockCodecs block_codecs;
constexpr int sparse_codecs[] = {static_cast<int>(SparseCodec::threshold),
                                 static_cast<int>(SparseCodec::topk),
                                 static_cast<int>(SparseCodec::topk2bit), 0};

}  // namespace

extern const WorkerCodings PYPS_KERNELS;
const WorkerCodings PYPS_KERNELS = {codings, sparse_codings, block_codecs.numbers, sparse_codecs};

}  // namespace pyps
