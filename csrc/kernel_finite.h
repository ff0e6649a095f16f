// Whether encoded numbers are finite.
//
// For kernels.cpp alone, which is compiled once per instruction set: everything is local to it.
#pragma once

#include "kernel_codecs.h"
#include "kernel_memory.h"

namespace pyps {
namespace {

// The carries out of the exponents: the top bit is set if any word is NaN or infinite.
template <class C>
inline typename C::Word exponent_carries(const Byte* encoded, std::size_t count) {
  using Word = typename C::Word;
  Word carries = 0;
  for (std::size_t i = 0; i < count; ++i) {  // Vectorised.
    const Word exponent = load<C>(encoded, i) & C::exponent_mask;
    carries = static_cast<Word>(carries | (exponent + C::exponent_one));
  }
  return carries;
}

template <class C>
inline bool is_carry(typename C::Word carries) {
  return carries >> (8 * sizeof(carries) - 1) != 0;
}

template <class C>
bool any_non_finite(const Byte* encoded, std::size_t count) {
  using Word = typename C::Word;
  constexpr std::size_t scan_piece = 2 * cache_line_size / sizeof(Word);
  Word carries = 0;
  for_each_piece<scan_piece>(count, [&](std::size_t start, std::size_t size) {
    const Byte* piece = encoded + start * sizeof(Word);
    prefetch(piece, scan_distance, size * sizeof(Word));
    carries = static_cast<Word>(carries | exponent_carries<C>(piece, size));
  });
  return is_carry<C>(carries);
}

template <class C>
std::ptrdiff_t first_non_finite_in(const Byte* encoded, std::size_t count) {
  if constexpr (is_words<C>) {
    constexpr std::size_t scan_block_max = 4096;
    for (std::size_t start = 0; start < count; start += scan_block_max) {
      const std::size_t left = count - start;
      const std::size_t block = left < scan_block_max ? left : scan_block_max;
      const Byte* words = encoded + C::bytes_of(start);
      if (!any_non_finite<C>(words, block)) continue;
      for (std::size_t i = 0; i < block; ++i) {
        if (any_non_finite<C>(words + C::bytes_of(i), 1)) {
          return static_cast<std::ptrdiff_t>(start + i);
        }
      }
    }
  } else {
    for (std::size_t start = 0; start < count; start += C::block) {
      const Byte* block = encoded + C::bytes_of(start);
      if (C::surely_finite(block)) continue;
      float values[C::block];
      const std::size_t size = count - start < C::block ? count - start : C::block;
      decode_block<C>(values, block, size);
      const auto found = first_non_finite_in<Float32>(reinterpret_cast<const Byte*>(values), size);
      if (found >= 0) return static_cast<std::ptrdiff_t>(start) + found;
    }
  }
  return -1;
}

}  // namespace
}  // namespace pyps
