// Rows of one size, found by their ids and ordered by their last use.
//
// An index of groups, each one line of memory, leads from an id to the row's number; rows lie in
// slabs that never move. This knows neither locks nor what a row holds behind its header.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

namespace pyps {

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

// Open addressing over groups of rows. A group counts the rows that went on because it was full, so
// that a search ends where none did, and an erased row leaves nothing behind.
class RowIndex {
 public:
  RowIndex() = default;
  explicit RowIndex(std::size_t num_rows) : memory_(allocate(size_for(num_rows))) {
    num_groups_ = size_for(num_rows) / sizeof(Group);
    std::memset(memory_.get(), 0, size());
  }

  static std::size_t size_for(std::size_t num_rows) {
    std::size_t num_groups = 1;
    while (num_rows_max(num_groups) < num_rows) num_groups *= 2;
    return num_groups * sizeof(Group);
  }
  std::size_t size() const { return num_groups_ * sizeof(Group); }
  bool has_room(std::size_t num_rows) const { return num_rows <= num_rows_max(num_groups_); }

  // Returns the first row of this hash for which is_it(row) is true, or `none`.
  template <class IsIt>
  std::uint32_t find(std::uint64_t hash, std::uint32_t none, IsIt is_it) const {
    std::size_t at = home(hash);
    for (std::size_t step = 0; step < num_groups_; ++step, at = next(at, hash)) {
      const Group& group = groups()[at];
      for (std::uint32_t fits = places(group, tag_of(hash)); fits != 0; fits &= fits - 1) {
        const std::uint32_t row = group.rows[__builtin_ctz(fits)];
        if (is_it(row)) return row;
      }
      if (group.num_passed == 0) break;
    }
    return none;
  }

  void insert(std::uint64_t hash, std::uint32_t row) {
    std::size_t at = home(hash);
    for (; places(groups()[at], 0) == 0; at = next(at, hash)) ++groups()[at].num_passed;
    const int place = __builtin_ctz(places(groups()[at], 0));
    groups()[at].tags[place] = tag_of(hash);
    groups()[at].rows[place] = row;
  }

  void erase(std::uint64_t hash, std::uint32_t row) {
    for (std::size_t at = home(hash);; at = next(at, hash)) {
      Group& group = groups()[at];
      for (std::uint32_t fits = places(group, tag_of(hash)); fits != 0; fits &= fits - 1) {
        const int place = __builtin_ctz(fits);
        if (group.rows[place] != row) continue;
        group.tags[place] = 0;
        return;
      }
      --group.num_passed;
    }
  }

  void prefetch(std::uint64_t hash) const {
    if (num_groups_ != 0) __builtin_prefetch(groups() + home(hash));
  }

 private:
  static constexpr std::size_t width = 12;

  // A tag is part of the hash, or 0 where the place is free.
  struct alignas(64) Group {
    std::uint8_t tags[width];
    std::uint32_t num_passed;
    std::uint32_t rows[width];
  };

  static std::size_t num_rows_max(std::size_t num_groups) { return num_groups * width * 7 / 8; }

  static std::uint8_t tag_of(std::uint64_t hash) {
    const auto tag = static_cast<std::uint8_t>(hash);
    return tag == 0 ? 1 : tag;
  }

  // Those that have this tag, a bit each.
  static std::uint32_t places(const Group& group, std::uint8_t tag) {
#if defined(__SSE2__)
    const __m128i tags = _mm_load_si128(reinterpret_cast<const __m128i*>(group.tags));
    const __m128i equal = _mm_cmpeq_epi8(tags, _mm_set1_epi8(static_cast<char>(tag)));
    return static_cast<std::uint32_t>(_mm_movemask_epi8(equal)) & ((1u << width) - 1);
#else
    std::uint32_t found = 0;
    for (std::size_t i = 0; i < width; ++i) found |= std::uint32_t{group.tags[i] == tag} << i;
    return found;
#endif
  }

  Group* groups() const { return reinterpret_cast<Group*>(memory_.get()); }
  std::size_t home(std::uint64_t hash) const { return hash >> 16 & (num_groups_ - 1); }
  // An odd distance leads to all groups, whose number is a power of two.
  std::size_t next(std::size_t at, std::uint64_t hash) const {
    return (at + (hash >> 8 & 0xff) * 2 + 1) & (num_groups_ - 1);
  }

  Memory memory_;
  std::size_t num_groups_ = 0;
};

struct RowHeader {
  std::int64_t id;
  std::uint64_t version;
  // Neighbours in the order of use.
  std::uint32_t older, newer;
};

class RowStore {
 public:
  static constexpr std::uint32_t none = UINT32_MAX;

  // `salt` makes another hash of the ids.
  RowStore(std::size_t body_size, std::uint64_t salt) : body_size_(body_size), salt_(salt) {}

  RowStore emptied() const { return {body_size_, salt_}; }

  std::size_t size() const { return size_; }
  std::uint32_t oldest() const { return oldest_; }
  std::uint32_t newest() const { return newest_; }
  RowHeader& header(std::uint32_t row) const {
    unsigned char* slab = slabs_[row / slab_rows];
    return *reinterpret_cast<RowHeader*>(slab + row % slab_rows * row_size());
  }
  unsigned char* body(std::uint32_t row) const {
    return reinterpret_cast<unsigned char*>(&header(row) + 1);
  }

  std::uint32_t find(std::int64_t id) const { return find(id, hash_of(id)); }

  // Calls use(i, row or none) for each id in this order while memory of the next ones is fetched:
  // so much of each body, and where use `renews` rows, their neighbours.
  template <bool renews, class Use>
  void for_each(std::span<const std::int64_t> ids, std::size_t body_fetched, Use use) const;

  // Adds the newest row, its body uninitialised. There must be room, and none of this id.
  std::uint32_t insert(std::int64_t id, std::uint64_t version) {
    const std::uint32_t row = first_erased_ != none ? first_erased_ : num_made_++;
    if (first_erased_ != none) first_erased_ = header(row).newer;
    header(row).id = id;
    header(row).version = version;
    link(row);
    index_.insert(hash_of(id), row);
    ++size_;
    return row;
  }

  void erase(std::uint32_t row) {
    index_.erase(hash_of(header(row).id), row);
    unlink(row);
    header(row).older = erased;
    header(row).newer = std::exchange(first_erased_, row);
    --size_;
  }

  // Makes a row the newest.
  void renew(std::uint32_t row, std::uint64_t version) {
    header(row).version = version;
    unlink(row);
    link(row);
  }

  std::size_t bytes() const {
    return memory_size_ + index_.size() + slabs_.capacity() * sizeof slabs_[0];
  }
  bool has_room(std::size_t num_rows) const {
    return index_.has_room(num_rows) && num_missing_slabs(num_rows) == 0;
  }
  // The most bytes that are held while the store grows to so many rows: the old index too.
  std::size_t bytes_for(std::size_t num_rows) const {
    const std::size_t missing = num_missing_slabs(num_rows);
    return bytes() + missing * slab_size() +
           (missing == 0 ? 0 : (slabs_.size() + missing) * sizeof slabs_[0]) +
           (index_.has_room(num_rows) ? 0 : RowIndex::size_for(num_rows));
  }

  // What makes room, prepared while others read the store, put in place while nobody does.
  struct Growth {
    std::vector<unsigned char*> slabs;
    Memory memory;
    std::size_t memory_size = 0;
    RowIndex index;
  };
  // Takes up to `spare` bytes more than it must, so that a large store grows in few steps.
  Growth grow(std::size_t num_rows, std::size_t spare);
  void adopt(Growth growth) {
    if (growth.memory != nullptr) {
      slabs_ = std::move(growth.slabs);
      memory_.push_back(std::move(growth.memory));
      memory_size_ += growth.memory_size;
    }
    if (growth.index.size() != 0) index_ = std::move(growth.index);
  }

 private:
  static constexpr std::size_t slab_rows = 256;
  // In place of the older neighbour of a row that is no more; the newer one is the next of these.
  static constexpr std::uint32_t erased = UINT32_MAX - 1;

  std::size_t row_size() const { return (sizeof(RowHeader) + body_size_ + 7) / 8 * 8; }
  std::size_t slab_size() const { return slab_rows * row_size(); }
  std::size_t num_missing_slabs(std::size_t num_rows) const {
    return std::max((num_rows + slab_rows - 1) / slab_rows, slabs_.size()) - slabs_.size();
  }

  std::uint64_t hash_of(std::int64_t id) const {
    return mix(static_cast<std::uint64_t>(id) ^ salt_);
  }
  std::uint32_t find(std::int64_t id, std::uint64_t hash) const {
    return index_.find(hash, none, [=, this](std::uint32_t row) { return header(row).id == id; });
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

  std::size_t body_size_;
  std::uint64_t salt_;
  RowIndex index_;
  std::vector<unsigned char*> slabs_;
  std::vector<Memory> memory_;
  std::size_t memory_size_ = 0;
  std::size_t size_ = 0;
  // Rows that ever were.
  std::uint32_t num_made_ = 0;
  std::uint32_t first_erased_ = none, oldest_ = none, newest_ = none;
};

template <bool renews, class Use>
void RowStore::for_each(std::span<const std::int64_t> ids, std::size_t body_fetched,
                        Use use) const {
  // Ids between two stages. What one finds is but a hint to the next: `use` may change all rows.
  constexpr std::size_t distance = 8, num_stages = renews ? 3 : 2, ring = 32;
  std::uint64_t hashes[ring];
  std::uint32_t hints[ring];
  // The rest of a long row is left to the processor's own prefetching.
  const std::size_t fetched = sizeof(RowHeader) + std::min<std::size_t>(body_fetched, 1024);
  for (std::size_t i = 0; i < ids.size() + num_stages * distance; ++i) {
    if (i < ids.size()) {
      hashes[i % ring] = hash_of(ids[i]);
      index_.prefetch(hashes[i % ring]);
    }
    if (const std::size_t k = i - distance; k < ids.size()) {
      hints[k % ring] = index_.find(hashes[k % ring], none, [](std::uint32_t) { return true; });
      if (hints[k % ring] != none) {
        const auto* row = reinterpret_cast<const unsigned char*>(&header(hints[k % ring]));
        const auto* line = row - reinterpret_cast<std::uintptr_t>(row) % 64;
        for (; line < row + fetched; line += 64) __builtin_prefetch(line, renews);
      }
    }
    if (const std::size_t k = i - 2 * distance;
        renews && k < ids.size() && hints[k % ring] != none) {
      for (const std::uint32_t near :
           {header(hints[k % ring]).older, header(hints[k % ring]).newer}) {
        if (near < num_made_) __builtin_prefetch(&header(near), 1);
      }
    }
    if (const std::size_t k = i - num_stages * distance; k < ids.size()) {
      use(k, find(ids[k], hashes[k % ring]));
    }
  }
}

inline RowStore::Growth RowStore::grow(std::size_t num_rows, std::size_t spare) {
  if (num_rows >= erased) throw std::length_error("a table holds fewer than 2^32 - 2 rows");
  Growth growth;
  if (const std::size_t missing = num_missing_slabs(num_rows); missing != 0) {
    const std::size_t step = std::min(slabs_.size() / 16, (std::size_t{16} << 20) / slab_size());
    const std::size_t most = missing + spare / (slab_size() + sizeof slabs_[0]);
    const std::size_t num = std::max(missing, std::min(step, most));
    growth.memory_size = num * slab_size();
    growth.memory = allocate(growth.memory_size);
    growth.slabs.reserve(slabs_.size() + num);
    growth.slabs = slabs_;
    for (std::size_t k = 0; k < num; ++k) {
      growth.slabs.push_back(growth.memory.get() + k * slab_size());
    }
    memory_.reserve(memory_.size() + 1);
  }
  if (!index_.has_room(num_rows)) {
    growth.index = RowIndex(num_rows);
    for (std::uint32_t row = 0; row < num_made_; ++row) {
      if (header(row).older != erased) growth.index.insert(hash_of(header(row).id), row);
    }
  }
  return growth;
}

}  // namespace pyps
