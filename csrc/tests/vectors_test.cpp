#include "vectors.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "isa.h"
#include "values.h"

namespace {

using pyps::ConstVector;
using pyps::Precision;
using pyps::Vector;

constexpr Precision precisions[] = {Precision::float32, Precision::float64};

// A vector in a block of its exact size, and the same numbers as an array of double.
class Values {
 public:
  Values(std::size_t count, Precision precision, unsigned seed)
      : precision_(precision), block_(new unsigned char[count * size_of(precision)]) {
    const std::vector<float> random = random_values(count, seed);
    exact_.assign(random.begin(), random.end());
    if (precision == Precision::float64) {
      for (double& value : exact_) value *= 1 + 0x1p-40;
      if (count != 0) std::memcpy(block_.get(), exact_.data(), count * sizeof(double));
    } else if (count != 0) {
      std::memcpy(block_.get(), random.data(), count * sizeof(float));
    }
  }

  double exact(std::size_t i) const { return exact_[i]; }
  double now(std::size_t i) const {
    if (precision_ == Precision::float64) {
      double value;
      std::memcpy(&value, block_.get() + i * sizeof value, sizeof value);
      return value;
    }
    float value;
    std::memcpy(&value, block_.get() + i * sizeof value, sizeof value);
    return double{value};
  }
  double rounded(double value) const {
    return precision_ == Precision::float64 ? value : double{static_cast<float>(value)};
  }
  Vector target() { return {block_.get(), precision_}; }
  ConstVector view() const { return {block_.get(), precision_}; }

 private:
  Precision precision_;
  std::unique_ptr<unsigned char[]> block_;
  std::vector<double> exact_;
};

template <class Expected>
void check_each(const Values& z, std::size_t count, Expected expected) {
  for (std::size_t i = 0; i < count; ++i) CHECK(z.now(i) == z.rounded(expected(i)));
}

template <class Term>
double lane_sum(std::size_t count, Term term) {
  double lanes[pyps::num_lanes] = {};
  for (std::size_t i = 0; i < count; ++i) lanes[i % pyps::num_lanes] += term(i);
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

void test_one(std::size_t count, Precision to, Precision of) {
  const pyps::VectorKernels& kernels = pyps::kernels().vectors;
  const Values x(count, of, 1);
  Values z(count, to, 2);
  kernels.move(z.target(), z.view(), 0.1, x.view(), count);
  check_each(z, count, [&](std::size_t i) { return z.exact(i) + 0.1 * x.exact(i); });
  kernels.copy(z.target(), x.view(), count);
  check_each(z, count, [&](std::size_t i) { return x.exact(i); });
  kernels.fill(z.target(), 0.1, count);
  check_each(z, count, [](std::size_t) { return 0.1; });
  kernels.scale(z.target(), 0.3, count);
  check_each(z, count, [&](std::size_t) { return 0.3 * z.rounded(0.1); });

  CHECK(kernels.norm1(x.view(), count) ==
        lane_sum(count, [&](std::size_t i) { return std::fabs(x.exact(i)); }));
  double largest = 0;
  for (std::size_t i = 0; i < count; ++i) largest = std::fmax(largest, std::fabs(x.exact(i)));
  CHECK(kernels.norm_inf(x.view(), count) == largest);
  if (count == 0) return;
  kernels.fill(z.target(), std::numeric_limits<double>::quiet_NaN(), count);
  CHECK(std::isnan(kernels.norm_inf(z.view(), count)));
}

void test_two(std::size_t count, Precision to, Precision left, Precision right) {
  const pyps::VectorKernels& kernels = pyps::kernels().vectors;
  const Values x(count, left, 1);
  const Values y(count, right, 2);
  Values z(count, to, 3);
  kernels.add(z.target(), x.view(), y.view(), count);
  check_each(z, count, [&](std::size_t i) { return x.exact(i) + y.exact(i); });
  kernels.subtract(z.target(), x.view(), y.view(), count);
  check_each(z, count, [&](std::size_t i) { return x.exact(i) - y.exact(i); });
  kernels.multiply(z.target(), x.view(), y.view(), count);
  check_each(z, count, [&](std::size_t i) { return x.exact(i) * y.exact(i); });
  kernels.move(z.target(), x.view(), -0.7, y.view(), count);
  check_each(z, count, [&](std::size_t i) { return x.exact(i) + -0.7 * y.exact(i); });
  CHECK(kernels.dot(x.view(), y.view(), count) ==
        lane_sum(count, [&](std::size_t i) { return x.exact(i) * y.exact(i); }));
}

std::vector<Values> mixed_values(std::size_t num, std::size_t count) {
  std::vector<Values> values;
  for (unsigned k = 0; k < num; ++k) values.emplace_back(count, precisions[k % 2], k);
  return values;
}

void test_combine(std::size_t count, Precision to, std::size_t num) {
  const std::vector<Values> values = mixed_values(num, count);
  std::vector<pyps::Term> terms;
  for (const Values& each : values) {
    terms.push_back({.scalar = 0.1 * static_cast<double>(terms.size()), .vector = each.view()});
  }
  terms.shrink_to_fit();
  Values z(count, to, 9);
  for (const double divisor : {1.0, 7.0}) {
    pyps::kernels().vectors.combine(z.target(), terms.data(), num, divisor, count);
    check_each(z, count, [&](std::size_t i) {
      double sum = 0;
      for (std::size_t k = 0; k < num; ++k) sum += terms[k].scalar * values[k].exact(i);
      return sum / divisor;
    });
  }
}

void test_gram(std::size_t count, std::size_t num) {
  const pyps::VectorKernels& kernels = pyps::kernels().vectors;
  const std::vector<Values> values = mixed_values(num, count);
  std::vector<ConstVector> vectors;
  for (const Values& each : values) vectors.push_back(each.view());
  std::vector<pyps::Pair> pairs;
  for (std::size_t left = 0; left < num; ++left) {
    for (std::size_t right = left; right < num; ++right) pairs.push_back({left, right});
  }
  vectors.shrink_to_fit();
  pairs.shrink_to_fit();
  std::vector<double> sums(pairs.size());
  std::vector<double> scratch(pyps::gram_scratch_count(num, pairs.size()));
  kernels.gram(sums.data(), pairs.data(), pairs.size(), vectors.data(), num, count, scratch.data());
  for (std::size_t k = 0; k < pairs.size(); ++k) {
    CHECK(sums[k] == kernels.dot(vectors[pairs[k].left], vectors[pairs[k].right], count));
  }
}

}  // namespace

void test_vectors() {
  for (const std::string& isa : pyps::available_isas()) {
    pyps::select_isa(isa);
    for (const std::size_t count : lengths) {
      for (const Precision to : precisions) {
        for (const Precision of : precisions) {
          test_one(count, to, of);
          for (const Precision other : precisions) test_two(count, to, of, other);
        }
        for (const std::size_t num : {0u, 1u, 3u}) test_combine(count, to, num);
      }
      for (const std::size_t num : {1u, 2u, 5u, 9u}) test_gram(count, num);
    }
  }
}
