// The loops over vectors that lie on the servers; see vectors.h for what each computes.
//
// For kernels.cpp alone, which is compiled once per instruction set: everything is local to it.
#pragma once

#include <cstddef>

#include "kernel_memory.h"
#include "vectors.h"

namespace pyps {
namespace {

// Calls `loop` with a pointer of the vector's own type, so that the loop reads without asking
// again.
template <class Loop>
inline auto with_precision(Vector vector, Loop loop) {
  if (vector.precision == Precision::float64) return loop(static_cast<double*>(vector.data));
  return loop(static_cast<float*>(vector.data));
}

template <class Loop>
inline auto with_precision(ConstVector vector, Loop loop) {
  if (vector.precision == Precision::float64) return loop(static_cast<const double*>(vector.data));
  return loop(static_cast<const float*>(vector.data));
}

// The elements of the loop behind it do not depend on each other.
#ifdef __clang__
#define PYPS_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define PYPS_INDEPENDENT _Pragma("GCC ivdep")
#endif

// z may be the very array of an x, which no element minds; the compiler is told so, for it would
// else compare the addresses and then go element by element.
template <class Z, class Function, class... X>
void map_loop(Z* z, std::size_t count, Function function, const X*... x) {
  PYPS_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i) {  // Vectorised.
    z[i] = static_cast<Z>(function(double{x[i]}...));
  }
}

template <class Function>
void map(Vector z, std::size_t count, Function function) {
  with_precision(z, [=](auto* to) { map_loop(to, count, function); });
}

template <class Function>
void map(Vector z, std::size_t count, Function function, ConstVector x) {
  with_precision(z, [=](auto* to) {
    with_precision(x, [=](const auto* from) { map_loop(to, count, function, from); });
  });
}

template <class Function>
void map(Vector z, std::size_t count, Function function, ConstVector x, ConstVector y) {
  with_precision(z, [=](auto* to) {
    with_precision(x, [=](const auto* left) {
      with_precision(y, [=](const auto* right) { map_loop(to, count, function, left, right); });
    });
  });
}

void fill_vector(Vector z, double a, std::size_t count) {
  map(z, count, [=] { return a; });
}

void copy_vector(Vector z, ConstVector x, std::size_t count) {
  map(z, count, [](double value) { return value; }, x);
}

void scale_vector(Vector z, double a, std::size_t count) {
  with_precision(
      z, [=](auto* to) { map_loop(to, count, [=](double value) { return a * value; }, to); });
}

void add_vectors(Vector z, ConstVector x, ConstVector y, std::size_t count) {
  map(z, count, [](double left, double right) { return left + right; }, x, y);
}

void subtract_vectors(Vector z, ConstVector x, ConstVector y, std::size_t count) {
  map(z, count, [](double left, double right) { return left - right; }, x, y);
}

void multiply_vectors(Vector z, ConstVector x, ConstVector y, std::size_t count) {
  map(z, count, [](double left, double right) { return left * right; }, x, y);
}

void move_vector(Vector z, ConstVector x, double a, ConstVector y, std::size_t count) {
  map(z, count, [=](double left, double right) { return left + a * right; }, x, y);
}

inline double sum_of_lanes(const double* lanes) {
  double sum = 0.0;
  for (std::size_t lane = 0; lane < num_lanes; ++lane) sum += lanes[lane];
  return sum;
}

template <class Function, class... X>
double lane_loop(std::size_t count, Function function, const X*... x) {
  double lanes[num_lanes] = {};
  const std::size_t whole = count - count % num_lanes;
  for (std::size_t start = 0; start < whole; start += num_lanes) {  // Vectorised.
    for (std::size_t lane = 0; lane < num_lanes; ++lane) {
      lanes[lane] += function(double{x[start + lane]}...);
    }
  }
  for (std::size_t i = whole; i < count; ++i) lanes[i - whole] += function(double{x[i]}...);
  return sum_of_lanes(lanes);
}

double dot(ConstVector x, ConstVector y, std::size_t count) {
  return with_precision(x, [=](const auto* left) {
    return with_precision(y, [=](const auto* right) {
      return lane_loop(count, [](double one, double other) { return one * other; }, left, right);
    });
  });
}

double norm1(ConstVector x, std::size_t count) {
  return with_precision(x, [=](const auto* values) {
    return lane_loop(count, [](double value) { return __builtin_fabs(value); }, values);
  });
}

template <class X>
double norm_inf_loop(const X* values, std::size_t count) {
  X largest[num_lanes] = {};
  // No comparison is true of NaN, which `largest` passes over.
  X not_a_number[num_lanes] = {};
  const std::size_t whole = count - count % num_lanes;
  const auto look = [&](std::size_t lane, X value) {
    const X magnitude = value < 0 ? -value : value;
    largest[lane] = magnitude > largest[lane] ? magnitude : largest[lane];
    not_a_number[lane] = value == value ? not_a_number[lane] : value;
  };
  for (std::size_t start = 0; start < whole; start += num_lanes) {
    for (std::size_t lane = 0; lane < num_lanes; ++lane) {  // Vectorised.
      look(lane, values[start + lane]);
    }
  }
  for (std::size_t i = whole; i < count; ++i) look(i - whole, values[i]);
  X found = 0;
  for (std::size_t lane = 0; lane < num_lanes; ++lane) {
    if (not_a_number[lane] != not_a_number[lane]) return not_a_number[lane];
    found = largest[lane] > found ? largest[lane] : found;
  }
  return found;
}

double norm_inf(ConstVector x, std::size_t count) {
  return with_precision(x, [=](const auto* values) { return norm_inf_loop(values, count); });
}

// Elements that are summed over all terms before the next ones: they stay in the nearest cache.
constexpr std::size_t combine_block_max = 256;

// Asks for what a loop over blocks of many vectors will read of this one. No processor foresees it
// by itself, and the nearest cache is too small for the next blocks of all.
template <class X>
inline void prefetch_block(const X* x, std::size_t count) {
  prefetch<in_outer_caches>(x, block_distance, count * sizeof(X));
}

template <class X>
inline void add_term(double* __restrict sums, const X* __restrict x, double scalar,
                     std::size_t count) {
  prefetch_block(x, count);
  for (std::size_t i = 0; i < count; ++i) {  // Vectorised.
    sums[i] = sums[i] + scalar * double{x[i]};
  }
}

template <class Z>
inline void store_quotients(Z* __restrict z, const double* __restrict sums, double divisor,
                            std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {  // Vectorised.
    z[i] = static_cast<Z>(sums[i] / divisor);
  }
}

void combine(Vector z, const Term* terms, std::size_t num, double divisor, std::size_t count) {
  double sums[combine_block_max];
  for (std::size_t start = 0; start < count; start += combine_block_max) {
    const std::size_t left = count - start;
    const std::size_t block = left < combine_block_max ? left : combine_block_max;
    for (std::size_t i = 0; i < block; ++i) sums[i] = 0.0;
    for (std::size_t index = 0; index < num; ++index) {
      const double scalar = terms[index].scalar;
      with_precision(terms[index].vector,
                     [&](const auto* x) { add_term(sums, x + start, scalar, block); });
    }
    with_precision(z, [&](auto* to) {
      if (divisor == 1) {
        map_loop(to + start, block, [](double sum) { return sum; }, sums);
      } else {
        store_quotients(to + start, sums, divisor, block);
      }
    });
  }
}

template <class X>
inline void widen(double* __restrict wide, const X* __restrict x, std::size_t count) {
  prefetch_block(x, count);
  for (std::size_t i = 0; i < count; ++i) {  // Vectorised.
    wide[i] = double{x[i]};
  }
}

inline void add_products(double* __restrict lanes, const double* x, const double* y,
                         std::size_t count) {
  for (std::size_t start = 0; start < count; start += num_lanes) {  // Vectorised.
    for (std::size_t lane = 0; lane < num_lanes; ++lane) {
      lanes[lane] += x[start + lane] * y[start + lane];
    }
  }
}

void gram(double* sums, const Pair* pairs, std::size_t num_pairs, const ConstVector* vectors,
          std::size_t num_vectors, std::size_t count, double* scratch) {
  double* blocks = scratch;
  double* lanes = scratch + num_vectors * gram_block_max;
  for (std::size_t i = 0; i < num_pairs * num_lanes; ++i) lanes[i] = 0.0;
  for (std::size_t start = 0; start < count; start += gram_block_max) {
    const std::size_t left = count - start;
    const std::size_t block = left < gram_block_max ? left : gram_block_max;
    // What a last block lacks is made up by zeros: no lane is ever -0, so adding 0 changes none.
    const std::size_t filled = block + (num_lanes - block % num_lanes) % num_lanes;
    for (std::size_t v = 0; v < num_vectors; ++v) {
      double* wide = blocks + v * gram_block_max;
      with_precision(vectors[v], [&](const auto* x) { widen(wide, x + start, block); });
      for (std::size_t i = block; i < filled; ++i) wide[i] = 0.0;
    }
    for (std::size_t k = 0; k < num_pairs; ++k) {
      add_products(lanes + k * num_lanes, blocks + pairs[k].left * gram_block_max,
                   blocks + pairs[k].right * gram_block_max, filled);
    }
  }
  for (std::size_t k = 0; k < num_pairs; ++k) sums[k] = sum_of_lanes(lanes + k * num_lanes);
}

}  // namespace
}  // namespace pyps
