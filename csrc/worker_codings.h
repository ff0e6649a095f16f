// What the library of workers computes, for one instruction set.
#pragma once

#include "codecs.h"
#include "sparse.h"

namespace pyps {

struct WorkerCodings {
  CodecKernels blocks;
  SparseKernels sparse;
  // The numbers of the codecs that each of them takes; 0 ends them.
  const int* block_codecs;
  const int* sparse_codecs;
};

}  // namespace pyps
