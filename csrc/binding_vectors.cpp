// The vectors' part of the module pyps._kernels.

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "binding_arguments.h"
#include "bindings.h"
#include "isa.h"
#include "kernels.h"
#include "vectors.h"

namespace pyps {
namespace {

// What a kernel reads may be the array that it writes, or shares no memory with it.
void require_fits(const Floats& z, const Floats& x) {
  x.require_count(z);
  if (x.data() != z.data()) z.require_apart(x);
}

// Arrays of one length, named as the items of a list.
std::vector<Floats> to_arrays(py::handle list, const std::string& name) {
  if (!py::isinstance<py::list>(list) && !py::isinstance<py::tuple>(list)) {
    throw py::type_error(name + " is of type " + type_name(list) + "; expected a list of arrays");
  }
  const auto items = py::reinterpret_borrow<py::sequence>(list);
  std::vector<Floats> arrays;
  arrays.reserve(items.size());
  for (const py::handle item : items) {
    arrays.emplace_back(item, name + "[" + std::to_string(arrays.size()) + "]", Access::read);
    arrays.back().require_count(arrays.front());
  }
  return arrays;
}

void vector_copy(py::handle z, py::handle x) {
  const Floats target(z, "z", Access::write);
  const Floats from(x, "x", Access::read);
  require_fits(target, from);
  py::gil_scoped_release release;
  if (from.size() != 0) std::memmove(target.mutable_data(), from.data(), from.size());
}

void vector_move(py::handle z, py::handle x, double a, py::handle y) {
  if (y.is_none()) return vector_copy(z, x);
  const Floats target(z, "z", Access::write);
  const Floats from(x, "x", Access::read);
  const Floats along(y, "y", Access::read);
  require_fits(target, from);
  require_fits(target, along);
  const VectorKernels& table = kernels().vectors;
  py::gil_scoped_release release;
  table.move(target.mutable_data(), from.data(), a, along.data(), target.count());
}

double vector_dot(py::handle x, py::handle y) {
  const Floats left(x, "x", Access::read);
  const Floats right(y, "y", Access::read);
  right.require_count(left);
  const VectorKernels& table = kernels().vectors;
  py::gil_scoped_release release;
  return table.dot(left.data(), right.data(), left.count());
}

using Norm = double (*VectorKernels::*)(const float*, std::size_t);

template <Norm norm>
double vector_norm(py::handle x) {
  const Floats values(x, "x", Access::read);
  const VectorKernels& table = kernels().vectors;
  py::gil_scoped_release release;
  return (table.*norm)(values.data(), values.count());
}

void combine(py::handle z, const std::vector<double>& scalars, const std::vector<Floats>& arrays,
             double divisor) {
  const Floats target(z, "z", Access::write);
  std::vector<Term> terms;
  for (const Floats& array : arrays) {
    require_fits(target, array);
    terms.push_back({.scalar = scalars[terms.size()], .vector = array.data()});
  }
  const VectorKernels& table = kernels().vectors;
  py::gil_scoped_release release;
  table.combine(target.mutable_data(), terms.data(), terms.size(), divisor, target.count());
}

void vector_combine(py::handle z, const std::vector<double>& scalars, py::handle vectors) {
  const std::vector<Floats> arrays = to_arrays(vectors, "vectors");
  if (scalars.size() != arrays.size()) {
    throw py::value_error(std::to_string(scalars.size()) + " scalars for " +
                          std::to_string(arrays.size()) + " vectors; expected one for each");
  }
  combine(z, scalars, arrays, 1.0);
}

void vector_fold(py::handle z, py::handle stages, double divisor) {
  const std::vector<Floats> arrays = to_arrays(stages, "stages");
  if (!(divisor > 0) || std::isinf(divisor)) {
    throw py::value_error("divisor is " + std::to_string(divisor) +
                          "; expected a number above 0 that is finite");
  }
  combine(z, std::vector<double>(arrays.size(), 1.0), arrays, divisor);
}

// The distinct vectors of two lists, and the distinct pairs of one of each: a vector is read once
// and a product computed once, however often it is requested.
class Products {
 public:
  Products(const std::vector<Floats>& names, const std::vector<Floats>& others) {
    for (const Floats& name : names) {
      for (const Floats& other : others) {
        Pair pair = {.left = index_of(name), .right = index_of(other)};
        if (pair.right < pair.left) std::swap(pair.left, pair.right);
        const auto [place, fresh] =
            places_.emplace(std::pair(pair.left, pair.right), pairs_.size());
        if (fresh) pairs_.push_back(pair);
        requested_.push_back(place->second);
      }
    }
  }

  void compute(double* products, std::size_t count, const VectorKernels& table) const {
    std::vector<double> scratch(gram_scratch_count(vectors_.size(), pairs_.size()));
    std::vector<double> sums(pairs_.size());
    table.gram(sums.data(), pairs_.data(), pairs_.size(), vectors_.data(), vectors_.size(), count,
               scratch.data());
    for (std::size_t i = 0; i < requested_.size(); ++i) products[i] = sums[requested_[i]];
  }

 private:
  std::size_t index_of(const Floats& numbers) {
    const auto [place, fresh] = indices_.emplace(numbers.data(), vectors_.size());
    if (fresh) vectors_.push_back(numbers.data());
    return place->second;
  }

  std::map<const float*, std::size_t> indices_;
  std::map<std::pair<std::size_t, std::size_t>, std::size_t> places_;
  std::vector<const float*> vectors_;
  std::vector<Pair> pairs_;
  // The pair of each requested product.
  std::vector<std::size_t> requested_;
};

py::array_t<double> vector_gram(py::handle names, py::handle others) {
  const std::vector<Floats> left = to_arrays(names, "names");
  const std::vector<Floats> right = to_arrays(others, "others");
  py::array_t<double> products({left.size(), right.size()});
  if (left.empty() || right.empty()) return products;
  right.front().require_count(left.front());
  double* out = products.mutable_data();
  const VectorKernels& table = kernels().vectors;
  {
    py::gil_scoped_release release;
    Products(left, right).compute(out, left.front().count(), table);
  }
  return products;
}

}  // namespace

void bind_vectors(py::module_& module) {
  using py::arg;
  const arg z("z"), x("x"), y("y"), a("a");

  module.def("vector_copy", &vector_copy, z, x);
  module.def("vector_move", &vector_move, z, x, a, y);
  module.def("vector_dot", &vector_dot, x, y);
  module.def("vector_norm1", &vector_norm<&VectorKernels::norm1>, x);
  module.def("vector_norm_inf", &vector_norm<&VectorKernels::norm_inf>, x);
  module.def("vector_combine", &vector_combine, z, arg("scalars"), arg("vectors"));
  module.def("vector_fold", &vector_fold, z, arg("stages"), arg("divisor"));
  module.def("vector_gram", &vector_gram, arg("names"), arg("others"));
}

}  // namespace pyps
