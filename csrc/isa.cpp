#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "processor.h"

namespace pyps {

extern const Kernels kernels_baseline;
#ifdef PYPS_HAS_AVX
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

namespace {

std::vector<const Kernels*> available_tables() {
  std::vector<const Kernels*> tables = {&kernels_baseline};
#ifdef PYPS_HAS_AVX
  if (has_avx2()) tables.push_back(&kernels_avx2);
  if (has_avx512()) tables.push_back(&kernels_avx512);
#endif
  return tables;
}

// `source` says in the error where the name came from.
const Kernels* find_table(const std::string& name, const std::string& source) {
  std::string choices;
  for (const Kernels* table : available_tables()) {
    if (name == table->isa) return table;
    choices += (choices.empty() ? "" : ", ") + std::string(table->isa);
  }
  throw std::invalid_argument(source + " is '" + name +
                              "', which is no instruction set of this build and processor; "
                              "expected one of: " +
                              choices);
}

const Kernels* choose_table() {
  const char* name = std::getenv("PYPS_ISA");
  if (name == nullptr || *name == '\0') return available_tables().back();
  return find_table(name, "PYPS_ISA");
}

std::atomic<const Kernels*>& current_table() {
  static std::atomic<const Kernels*> table{choose_table()};
  return table;
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Kernels* table : available_tables()) names.emplace_back(table->isa);
  return names;
}

const Kernels& kernels() { return *current_table().load(std::memory_order_relaxed); }

std::span<const CodecTraits> all_codecs() {
  return {kernels_baseline.codecs, kernels_baseline.num_codecs};
}

void select_isa(const std::string& name) { current_table() = find_table(name, "instruction set"); }

}  // namespace pyps
