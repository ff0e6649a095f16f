// The workers' part of the kernels: compiled once per instruction set, as kernels.cpp.
#include "worker_codings.h"

#include "kernel_codecs.h"
#include "kernel_sparse.h"

namespace pyps {

extern const WorkerCodings PYPS_KERNELS;
const WorkerCodings PYPS_KERNELS = {codings, sparse_codings};

}  // namespace pyps
