// The library that pyps_wire/native.py loads: plain C, so that one build serves all Pythons.

#include "processor.h"
#include "worker_codings.h"

namespace pyps {

extern const WorkerCodings codings_baseline;
#ifdef PYPS_HAS_AVX
extern const WorkerCodings codings_avx2;
extern const WorkerCodings codings_avx512;
#endif

}  // namespace pyps

// The table of an instruction set, from the narrowest on; null where the processor lacks it.
extern "C" __attribute__((visibility("default"))) const pyps::WorkerCodings* pyps_codings(int isa) {
  if (isa == 0) return &pyps::codings_baseline;
#ifdef PYPS_HAS_AVX
  if (isa == 1 && pyps::has_avx2()) return &pyps::codings_avx2;
  if (isa == 2 && pyps::has_avx512()) return &pyps::codings_avx512;
#endif
  return nullptr;
}

// The numbers of the codecs whose numbers share bytes, or of those that send some numbers; 0 ends
// them.
extern "C" __attribute__((visibility("default"))) const int* pyps_codecs(bool sparse) {
  const pyps::WorkerCodings& table = pyps::codings_baseline;
  return sparse ? table.sparse_codecs : table.block_codecs;
}
