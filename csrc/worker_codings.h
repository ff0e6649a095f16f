// What the library of workers computes, for one instruction set.
#pragma once

#include "codecs.h"
#include "sparse.h"

namespace pyps {

struct WorkerCodings {
  CodecKernels blocks;
  SparseKernels sparse;
};

}  // namespace pyps
