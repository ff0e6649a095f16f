// The vectors' part of the module pyps._kernels: arithmetic on float32 and float64 in any mixture.

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cmath>
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

ConstVector view(const Numbers& x) { return {.data = x.data(), .precision = x.precision()}; }

// What is written to, and what may be read beside it: arrays of its length that are the same array
// or share no memory with it.
class Target {
 public:
  explicit Target(py::handle z) : numbers_(z, "z", Access::write) {}

  void require_fits(const Numbers& x) const {
    x.require_count(numbers_);
    const bool same = x.data() == numbers_.data() && x.precision() == numbers_.precision();
    if (!same) numbers_.require_apart(x);
  }

  Vector view() const {
    return {.data = numbers_.mutable_data(), .precision = numbers_.precision()};
  }
  std::size_t count() const { return numbers_.count(); }

 private:
  Numbers numbers_;
};

// Arrays of one length, named as the items of a list.
template <class Array>
std::vector<Array> to_arrays(py::handle list, const std::string& name) {
  if (!py::isinstance<py::list>(list) && !py::isinstance<py::tuple>(list)) {
    throw py::type_error(name + " is of type " + type_name(list) + "; expected a list of arrays");
  }
  const auto items = py::reinterpret_borrow<py::sequence>(list);
  std::vector<Array> arrays;
  arrays.reserve(items.size());
  for (const py::handle item : items) {
    arrays.emplace_back(item, name + "[" + std::to_string(arrays.size()) + "]", Access::read);
    arrays.back().require_count(arrays.front());
  }
  return arrays;
}

void vector_fill(py::handle z, double a) {
  const Target target(z);
  const VectorKernels& table = kernels().vectors;
  py::gil_scoped_release release;
  table.fill(target.view(), a, target.count());
}

void vector_copy(py::handle z, py::handle x) {
  const Target target(z);
  const Numbers from(x, "x", Access::read);
  target.require_fits(from);
  const VectorKernels& table = kernels().vectors;
  py::gil_scoped_release release;
  table.copy(target.view(), view(from), target.count());
}

void vector_scale(py::handle z, double a) {
  const Target target(z);
  const VectorKernels& table = kernels().vectors;
  py::gil_scoped_release release;
  table.scale(target.view(), a, target.count());
}

using Binary = void (*VectorKernels::*)(Vector, ConstVector, ConstVector, std::size_t);

template <Binary operation>
void vector_binary(py::handle z, py::handle x, py::handle y) {
  const Target target(z);
  const Numbers left(x, "x", Access::read);
  const Numbers right(y, "y", Access::read);
  target.require_fits(left);
  target.require_fits(right);
  const VectorKernels& table = kernels().vectors;
  py::gil_scoped_release release;
  (table.*operation)(target.view(), view(left), view(right), target.count());
}

void vector_move(py::handle z, py::handle x, double a, py::handle y) {
  if (y.is_none()) return vector_copy(z, x);
  const Target target(z);
  const Numbers from(x, "x", Access::read);
  const Numbers along(y, "y", Access::read);
  target.require_fits(from);
  target.require_fits(along);
  const VectorKernels& table = kernels().vectors;
  py::gil_scoped_release release;
  table.move(target.view(), view(from), a, view(along), target.count());
}

void vector_axpy(py::handle z, double a, py::handle x) {
  const Target target(z);
  const Numbers along(x, "x", Access::read);
  target.require_fits(along);
  const VectorKernels& table = kernels().vectors;
  const Vector to = target.view();
  py::gil_scoped_release release;
  table.move(to, {.data = to.data, .precision = to.precision}, a, view(along), target.count());
}

double vector_dot(py::handle x, py::handle y) {
  const Numbers left(x, "x", Access::read);
  const Numbers right(y, "y", Access::read);
  right.require_count(left);
  const VectorKernels& table = kernels().vectors;
  py::gil_scoped_release release;
  return table.dot(view(left), view(right), left.count());
}

double vector_norm1(py::handle x) {
  const Numbers values(x, "x", Access::read);
  const VectorKernels& table = kernels().vectors;
  py::gil_scoped_release release;
  return table.norm1(view(values), values.count());
}

double vector_norm_inf(py::handle x) {
  const Numbers values(x, "x", Access::read);
  const VectorKernels& table = kernels().vectors;
  py::gil_scoped_release release;
  return table.norm_inf(view(values), values.count());
}

void combine(const Target& target, const std::vector<Term>& terms, double divisor) {
  const VectorKernels& table = kernels().vectors;
  py::gil_scoped_release release;
  table.combine(target.view(), terms.data(), terms.size(), divisor, target.count());
}

void vector_combine(py::handle z, const std::vector<double>& scalars, py::handle vectors) {
  const Target target(z);
  const std::vector<Numbers> arrays = to_arrays<Numbers>(vectors, "vectors");
  if (scalars.size() != arrays.size()) {
    throw py::value_error(std::to_string(scalars.size()) + " scalars for " +
                          std::to_string(arrays.size()) + " vectors; expected one for each");
  }
  std::vector<Term> terms;
  for (const Numbers& array : arrays) {
    target.require_fits(array);
    terms.push_back({.scalar = scalars[terms.size()], .vector = view(array)});
  }
  combine(target, terms, 1.0);
}

void vector_fold(py::handle z, py::handle stages, double divisor) {
  const Target target(z);
  const std::vector<Floats> arrays = to_arrays<Floats>(stages, "stages");
  if (!(divisor > 0) || std::isinf(divisor)) {
    throw py::value_error("divisor is " + std::to_string(divisor) +
                          "; expected a number above 0 that is finite");
  }
  std::vector<Term> terms;
  for (const Floats& array : arrays) {
    target.require_fits(array);
    terms.push_back({.scalar = 1.0, .vector = view(array)});
  }
  combine(target, terms, divisor);
}

// The distinct vectors of two lists, and the distinct pairs of one of each: a vector is read once
// and a product made once, however often it is asked for.
class Products {
 public:
  Products(const std::vector<Numbers>& names, const std::vector<Numbers>& others) {
    for (const Numbers& name : names) {
      for (const Numbers& other : others) {
        Pair pair = {.left = index_of(name), .right = index_of(other)};
        if (pair.right < pair.left) std::swap(pair.left, pair.right);
        const auto [place, fresh] =
            places_.emplace(std::pair(pair.left, pair.right), pairs_.size());
        if (fresh) pairs_.push_back(pair);
        asked_.push_back(place->second);
      }
    }
  }

  void compute(double* products, std::size_t count, const VectorKernels& table) const {
    std::vector<double> scratch(gram_scratch_count(vectors_.size(), pairs_.size()));
    std::vector<double> sums(pairs_.size());
    table.gram(sums.data(), pairs_.data(), pairs_.size(), vectors_.data(), vectors_.size(), count,
               scratch.data());
    for (std::size_t i = 0; i < asked_.size(); ++i) products[i] = sums[asked_[i]];
  }

 private:
  std::size_t index_of(const Numbers& numbers) {
    const auto [place, fresh] =
        indices_.emplace(std::pair(numbers.data(), numbers.precision()), vectors_.size());
    if (fresh) vectors_.push_back(view(numbers));
    return place->second;
  }

  std::map<std::pair<const void*, Precision>, std::size_t> indices_;
  std::map<std::pair<std::size_t, std::size_t>, std::size_t> places_;
  std::vector<ConstVector> vectors_;
  std::vector<Pair> pairs_;
  // Of each product that is asked for, its pair.
  std::vector<std::size_t> asked_;
};

py::array_t<double> vector_gram(py::handle names, py::handle others) {
  const std::vector<Numbers> left = to_arrays<Numbers>(names, "names");
  const std::vector<Numbers> right = to_arrays<Numbers>(others, "others");
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

  module.def("vector_fill", &vector_fill, z, a, "z = a, in every element");
  module.def("vector_copy", &vector_copy, z, x, "z = x");
  module.def("vector_scale", &vector_scale, z, a, "z = a * z");
  module.def("vector_add", &vector_binary<&VectorKernels::add>, z, x, y, "z = x + y");
  module.def("vector_subtract", &vector_binary<&VectorKernels::subtract>, z, x, y, "z = x - y");
  module.def("vector_multiply", &vector_binary<&VectorKernels::multiply>, z, x, y, "z = x * y");
  module.def("vector_axpy", &vector_axpy, z, a, x, "z = z + a * x");
  module.def("vector_move", &vector_move, z, x, a, y, "z = x + a * y, or z = x where y is None");
  module.def("vector_dot", &vector_dot, x, y, "Returns the sum of x * y.");
  module.def("vector_norm1", &vector_norm1, x, "Returns the sum of |x|.");
  module.def("vector_norm_inf", &vector_norm_inf, x,
             "Returns the largest |x|: 0.0 of no elements, NaN where one is NaN.");
  module.def("vector_combine", &vector_combine, z, arg("scalars"), arg("vectors"),
             "z = the sum of scalars[i] * vectors[i]");
  module.def("vector_fold", &vector_fold, z, arg("stages"), arg("divisor"),
             "z = the sum of the stages, in their order, divided by `divisor`");
  module.def("vector_gram", &vector_gram, arg("names"), arg("others"),
             "Returns vector_dot of each of `names` with each of `others`, row by row.");
}

}  // namespace pyps
