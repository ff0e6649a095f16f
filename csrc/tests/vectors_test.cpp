#include "vectors.h"

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "isa.h"
#include "values.h"

namespace {

// A vector in a block of its exact size, and the numbers that it began with.
class Values {
 public:
  Values(std::size_t count, unsigned seed)
      : exact_(random_values(count, seed)), block_(new float[count]) {
    for (std::size_t i = 0; i < count; ++i) block_[i] = exact_[i];
  }

  double exact(std::size_t i) const { return double{exact_[i]}; }
  float now(std::size_t i) const { return block_[i]; }
  float* target() { return block_.get(); }
  const float* view() const { return block_.get(); }

 private:
  std::vector<float> exact_;
  std::unique_ptr<float[]> block_;
};

template <class Expected>
void check_each(const Values& z, std::size_t count, Expected expected) {
  for (std::size_t i = 0; i < count; ++i) CHECK(z.now(i) == static_cast<float>(expected(i)));
}

template <class Term>
double lane_sum(std::size_t count, Term term) {
  double lanes[pyps::num_lanes] = {};
  for (std::size_t i = 0; i < count; ++i) lanes[i % pyps::num_lanes] += term(i);
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

void test_elements(std::size_t count) {
  const pyps::VectorKernels& kernels = pyps::kernels().vectors;
  const Values x(count, 1);
  const Values y(count, 2);
  Values z(count, 3);
  kernels.move(z.target(), x.view(), -0.7, y.view(), count);
  check_each(z, count, [&](std::size_t i) { return x.exact(i) + -0.7 * y.exact(i); });
  Values own(count, 4);
  kernels.move(own.target(), own.view(), 0.1, x.view(), count);
  check_each(own, count, [&](std::size_t i) { return own.exact(i) + 0.1 * x.exact(i); });
  CHECK(kernels.dot(x.view(), y.view(), count) ==
        lane_sum(count, [&](std::size_t i) { return x.exact(i) * y.exact(i); }));
  CHECK(kernels.norm1(x.view(), count) ==
        lane_sum(count, [&](std::size_t i) { return std::fabs(x.exact(i)); }));
  double largest = 0;
  for (std::size_t i = 0; i < count; ++i) largest = std::fmax(largest, std::fabs(x.exact(i)));
  CHECK(kernels.norm_inf(x.view(), count) == largest);
  if (count == 0) return;
  z.target()[count / 2] = std::numeric_limits<float>::quiet_NaN();
  CHECK(std::isnan(kernels.norm_inf(z.view(), count)));
}

std::vector<Values> several_values(std::size_t num, std::size_t count) {
  std::vector<Values> values;
  for (unsigned k = 0; k < num; ++k) values.emplace_back(count, k);
  return values;
}

void test_combine(std::size_t count, std::size_t num) {
  const std::vector<Values> values = several_values(num, count);
  std::vector<pyps::Term> terms;
  for (const Values& each : values) {
    terms.push_back({.scalar = 0.1 * static_cast<double>(terms.size()), .vector = each.view()});
  }
  terms.shrink_to_fit();
  Values z(count, 9);
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
  const std::vector<Values> values = several_values(num, count);
  std::vector<const float*> vectors;
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
      test_elements(count);
      for (const std::size_t num : {0u, 1u, 3u}) test_combine(count, num);
      for (const std::size_t num : {1u, 2u, 5u, 9u}) test_gram(count, num);
    }
  }
}
