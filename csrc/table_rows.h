// Rows of one size, found by their ids and ordered by their last use.
//
// An index leads from an id to the row's number; rows lie in slabs that never move. This knows
// neither locks nor what numbers a row holds.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

namespace pyps {

// Numbers that may begin at any byte.
template <class Number>
struct Packed {
  const unsigned char* first = nullptr;
  std::size_t count = 0;

  Number operator[](std::size_t index) const {
    Number number;
    std::memcpy(&number, first + index * sizeof number, sizeof number);
    return number;
  }
  Packed piece(std::size_t start, std::size_t count_max) const {
    return {first + start * sizeof(Number), std::min(count - start, count_max)};
  }
};
using Ids = Packed<std::int64_t>;
using Versions = Packed<std::uint64_t>;

// The finaliser of splitmix64: a bijection of which every bit depends on all bits of x.
constexpr std::uint64_t mix(std::uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

struct FreeAligned {
  std::align_val_t alignment;
  void operator()(unsigned char* memory) const { ::operator delete(memory, alignment); }
};
using Memory = std::unique_ptr<unsigned char, FreeAligned>;

// Rows are read at random: with small pages the processor would look up an address for each.
inline Memory allocate(std::size_t size) {
  constexpr std::size_t line = 64, huge_page = std::size_t{2} << 20;
  const std::align_val_t alignment{size < huge_page ? line : huge_page};
  Memory memory(static_cast<unsigned char*>(::operator new(size, alignment)), {alignment});
#if defined(MADV_HUGEPAGE)
  if (size >= huge_page) madvise(memory.get(), size, MADV_HUGEPAGE);
#endif
  return memory;
}

// Open addressing with linear probing. A tag is 32 bits of a hash: the search for it begins at the
// place that they say, so nothing else is read when an entry moves.
class RowIndex {
 public:
  static constexpr std::uint32_t none = UINT32_MAX;

  explicit RowIndex(std::size_t num_rows = 0)
      : memory_(allocate(size_for(num_rows))), num_entries_(size_for(num_rows) / sizeof(Entry)) {
    std::fill_n(entries(), num_entries_, Entry{0, none});
  }

  // At least a fourth is free.
  static std::size_t size_for(std::size_t num_rows) {
    return std::bit_ceil(num_rows + num_rows / 3 + 1) * sizeof(Entry);
  }
  std::size_t size() const { return num_entries_ * sizeof(Entry); }

  void reserve(std::size_t num_rows) {
    if (size_for(num_rows) <= size()) return;
    RowIndex larger(num_rows);
    for (std::size_t i = 0; i < num_entries_; ++i) {
      if (entries()[i].row != none) larger.insert(entries()[i].tag, entries()[i].row);
    }
    *this = std::move(larger);
  }

  // Returns the first row of this tag for which is_it(row) is true, or `none`.
  template <class IsIt>
  std::uint32_t find(std::uint32_t tag, IsIt is_it) const {
    return entries()[place_of(tag, is_it)].row;
  }

  void insert(std::uint32_t tag, std::uint32_t row) {
    entries()[place_of(tag, [](std::uint32_t) { return false; })] = {tag, row};
  }

  void erase(std::uint32_t tag, std::uint32_t row) {
    std::size_t gap = place_of(tag, [=](std::uint32_t found) { return found == row; });
    for (std::size_t at = next(gap); entries()[at].row != none; at = next(at)) {
      // What is searched for from behind the gap stays.
      if (((at - home(entries()[at].tag)) & (num_entries_ - 1)) <
          ((at - gap) & (num_entries_ - 1))) {
        continue;
      }
      entries()[gap] = entries()[at];
      gap = at;
    }
    entries()[gap].row = none;
  }

  void prefetch(std::uint32_t tag) const { __builtin_prefetch(entries() + home(tag)); }

 private:
  struct Entry {
    std::uint32_t tag, row;
  };

  Entry* entries() const { return reinterpret_cast<Entry*>(memory_.get()); }
  std::size_t home(std::uint32_t tag) const { return tag * std::uint64_t{num_entries_} >> 32; }
  std::size_t next(std::size_t at) const { return (at + 1) & (num_entries_ - 1); }

  template <class IsIt>
  std::size_t place_of(std::uint32_t tag, IsIt is_it) const {
    std::size_t at = home(tag);
    for (; entries()[at].row != none; at = next(at)) {
      if (entries()[at].tag == tag && is_it(entries()[at].row)) break;
    }
    return at;
  }

  Memory memory_;
  std::size_t num_entries_;
};

struct RowHeader {
  std::int64_t id;
  std::uint64_t version;
  // Neighbours in the order of use.
  std::uint32_t older, newer;
};

class RowStore {
 public:
  static constexpr std::uint32_t none = RowIndex::none;

  // Bytes of a row's parameters and slots. `salt` makes another hash of the ids.
  RowStore(std::size_t size_of_parameters, std::size_t size_of_slots, std::uint64_t salt)
      : parameters_size(size_of_parameters), slots_size(size_of_slots), salt_(salt) {}

  const std::size_t parameters_size, slots_size;

  std::size_t size() const { return size_; }
  std::uint32_t oldest() const { return oldest_; }
  std::uint32_t newest() const { return newest_; }
  RowHeader& header(std::uint32_t row) const {
    unsigned char* slab = slabs_[row / slab_rows];
    return *reinterpret_cast<RowHeader*>(slab + row % slab_rows * row_size());
  }
  unsigned char* parameters(std::uint32_t row) const {
    return reinterpret_cast<unsigned char*>(&header(row) + 1);
  }
  unsigned char* slots(std::uint32_t row) const { return parameters(row) + slots_offset(); }

  std::uint32_t find(std::int64_t id) const { return find(id, tag_of(id)); }

  // Calls use(i, row or none) for each id in this order while memory of the next ones is fetched:
  // so much of each row, and where use `renews` rows, their neighbours.
  template <bool renews, class Use>
  void for_each(Ids ids, std::size_t fetched, Use use) const;

  // Adds the newest row, its numbers uninitialised. There must be room, and none of this id.
  std::uint32_t insert(std::int64_t id, std::uint64_t version) {
    const std::uint32_t row = first_erased_ != none ? first_erased_ : num_made_++;
    if (first_erased_ != none) first_erased_ = header(row).newer;
    header(row).id = id;
    header(row).version = version;
    link(row);
    index_.insert(tag_of(id), row);
    ++size_;
    return row;
  }

  void erase(std::uint32_t row) {
    index_.erase(tag_of(header(row).id), row);
    unlink(row);
    header(row).newer = std::exchange(first_erased_, row);
    --size_;
  }

  // Makes a row the newest.
  void renew(std::uint32_t row, std::uint64_t version) {
    header(row).version = version;
    unlink(row);
    link(row);
  }

  // The bytes with so many rows; memory that no row ever used is none yet.
  std::size_t bytes_for(std::size_t num_rows) const {
    return std::max<std::size_t>(num_rows, num_made_) * row_size() +
           std::max(RowIndex::size_for(num_rows), index_.size());
  }
  // Whether so many rows take no larger index.
  bool has_room(std::size_t num_rows) const {
    return RowIndex::size_for(num_rows) <= index_.size();
  }
  void reserve(std::size_t num_rows);

 private:
  static constexpr std::size_t slab_rows = 256;

  std::size_t slots_offset() const { return (parameters_size + 3) / 4 * 4; }
  std::size_t row_size() const {
    return (sizeof(RowHeader) + slots_offset() + slots_size + 7) / 8 * 8;
  }

  std::uint32_t tag_of(std::int64_t id) const {
    return static_cast<std::uint32_t>(mix(static_cast<std::uint64_t>(id) ^ salt_) >> 32);
  }
  std::uint32_t find(std::int64_t id, std::uint32_t tag) const {
    return index_.find(tag, [=, this](std::uint32_t row) { return header(row).id == id; });
  }

  void link(std::uint32_t row) {
    header(row).older = newest_;
    header(row).newer = none;
    (newest_ == none ? oldest_ : header(newest_).newer) = row;
    newest_ = row;
  }
  void unlink(std::uint32_t row) {
    const auto [id, version, older, newer] = header(row);
    (older == none ? oldest_ : header(older).newer) = newer;
    (newer == none ? newest_ : header(newer).older) = older;
  }

  std::uint64_t salt_;
  RowIndex index_;
  std::vector<unsigned char*> slabs_;
  std::vector<Memory> memory_;
  std::size_t size_ = 0;
  // Rows that ever were.
  std::uint32_t num_made_ = 0;
  std::uint32_t first_erased_ = none, oldest_ = none, newest_ = none;
};

template <bool renews, class Use>
void RowStore::for_each(Ids ids, std::size_t fetched, Use use) const {
  // Ids between two stages. What one finds is but a hint to the next: `use` may change all rows.
  constexpr std::size_t distance = 8, num_stages = renews ? 3 : 2, ring = 32;
  std::uint32_t tags[ring], hints[ring];
  // The rest of a long row is left to the processor's own prefetching.
  fetched = sizeof(RowHeader) + std::min<std::size_t>(fetched, 1024);
  for (std::size_t i = 0; i < ids.count + num_stages * distance; ++i) {
    if (i < ids.count) {
      tags[i % ring] = tag_of(ids[i]);
      index_.prefetch(tags[i % ring]);
    }
    if (const std::size_t k = i - distance; k < ids.count) {
      hints[k % ring] = index_.find(tags[k % ring], [](std::uint32_t) { return true; });
      if (hints[k % ring] != none) {
        const auto* row = reinterpret_cast<const unsigned char*>(&header(hints[k % ring]));
        const auto* line = row - reinterpret_cast<std::uintptr_t>(row) % 64;
        for (; line < row + fetched; line += 64) __builtin_prefetch(line, renews);
      }
    }
    if (const std::size_t k = i - 2 * distance;
        renews && k < ids.count && hints[k % ring] != none) {
      for (const std::uint32_t near :
           {header(hints[k % ring]).older, header(hints[k % ring]).newer}) {
        if (near < num_made_) __builtin_prefetch(&header(near), 1);
      }
    }
    if (const std::size_t k = i - num_stages * distance; k < ids.count) {
      use(k, find(ids[k], tags[k % ring]));
    }
  }
}

inline void RowStore::reserve(std::size_t num_rows) {
  if (num_rows >= none) throw std::length_error("a table holds fewer than 2^32 - 1 rows");
  index_.reserve(num_rows);
  const std::size_t slab_size = slab_rows * row_size(), num = slabs_.size();
  if (num_rows <= num * slab_rows) return;
  const std::size_t missing = (num_rows - 1) / slab_rows + 1 - num;
  // A large store grows in few steps.
  const std::size_t step = std::max(missing, std::min(num, (std::size_t{16} << 20) / slab_size));
  slabs_.reserve(num + step);
  memory_.push_back(allocate(step * slab_size));
  for (std::size_t k = 0; k < step; ++k) slabs_.push_back(memory_.back().get() + k * slab_size);
}

}  // namespace pyps
