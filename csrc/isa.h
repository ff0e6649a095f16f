// Which instruction set the kernels run on.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "kernels.h"

namespace pyps {

// Names of the sets that are built in and that this processor has, narrowest first.
std::vector<std::string> available_isas();

// The table in use: the widest available or, if set, the one that the environment variable PYPS_ISA
// names. It is chosen at the first call. Throws std::invalid_argument if PYPS_ISA names another.
const Kernels& kernels();

// The codecs that kernels read and write, the same in every table.
std::span<const CodecTraits> all_codecs();

// Switches the table under every caller. For tests, which compare the sets.
void select_isa(const std::string& name);

}  // namespace pyps
