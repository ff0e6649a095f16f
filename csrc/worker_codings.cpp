// The workers' part of the kernels: compiled once per instruction set, as kernels.cpp.
#include "kernel_codecs.h"

namespace pyps {

extern const CodecKernels PYPS_KERNELS;
const CodecKernels PYPS_KERNELS = codings;

}  // namespace pyps
