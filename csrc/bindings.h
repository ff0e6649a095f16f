// The functions that add the parts of the module.
#pragma once

#include <pybind11/pybind11.h>

namespace pyps {

// Adds the update rules.
void bind_rules(pybind11::module_& module);

// Adds the tables of rows.
void bind_tables(pybind11::module_& module);

// Adds the arithmetic on vectors.
void bind_vectors(pybind11::module_& module);

}  // namespace pyps
