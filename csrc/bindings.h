// How the module's parts come together.
#pragma once

#include <pybind11/pybind11.h>

namespace pyps {

// Adds the update rules.
void bind_rules(pybind11::module_& module);

}  // namespace pyps
