// A table: rows of numbers by their ids. A row comes to be at its first update.
//
// Before that it is its initial value, a function of seed, id and column. So a lookup changes
// nothing, and a table is a function of its updates, to the bit on every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <string>
#include <vector>

#include "isa.h"
#include "kernels.h"
#include "table_rows.h"

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
};
using Ids = Packed<std::int64_t>;
using Versions = Packed<std::uint64_t>;

constexpr std::size_t dim_max = 1024;

// _kernels.pyi says what each is; 0 is for none.
struct TableSettings {
  std::size_t dim = 1;
  std::string rule;
  Codec codec = Codec::float32;
  std::vector<float> first_slots;
  std::uint64_t seed = 0;
  float scale = 0;
  float norm_max = 0;
  std::uint32_t min_count = 0;
  std::uint64_t ttl = 0;
  std::size_t capacity = 0;
  std::size_t bytes_max = 0;
};

// The gradients of some rows, whose ids ascend; each row is encoded by itself.
struct TablePart {
  Ids ids;
  const unsigned char* payload;
  CodecTraits codec;
  float factor;
};

struct TableStats {
  std::size_t rows, candidates, bytes;
  std::uint64_t admitted, dropped, evicted, expired, version;
};

// The rule of this name, a shard's or one of rows alone; null where there is none.
const Rule* find_rule(const Kernels& table, const std::string& name);

// Any thread may call anything: writers wait for each other, and hold up readers for a few rows at
// a time, so that these see whole rows. Bad arguments are std::invalid_argument, and more memory
// than is allowed is std::bad_alloc; what is refused changes nothing.
class Table {
 public:
  // The rule must be known.
  explicit Table(const TableSettings& settings);

  const TableSettings& settings() const { return settings_; }
  const Rule& rule() const { return *find_rule(kernels(), settings_.rule); }

  // A row, or an id on its way to become one.
  enum class Kind { row, candidate };

  // The bytes of each: a row's parameters, then its slots; or a candidate's count.
  struct Layout {
    std::size_t parameters_size, slots_size;

    std::size_t slots_offset() const { return (parameters_size + 3) / 4 * 4; }
    std::size_t size() const { return slots_offset() + slots_size; }
  };
  const Layout& layout(Kind kind) const { return kind == Kind::row ? row_ : candidate_; }

  // Applies the weighted sum of the parts that have it to each row, under a version above the last.
  void update(std::span<const TablePart> parts, const float* numbers, std::uint64_t version);

  // The bytes of the table after an update of these ids, which ascend in each list; as many as now
  // where there is room for all.
  std::size_t bytes_with(std::span<const Ids> lists, std::uint64_t version);

  // Writes rows, each encoded by itself; returns how many of them are more than initial.
  std::size_t lookup(Ids ids, unsigned char* encoded, const CodecTraits& codec) const;

  struct Dump {
    std::vector<std::int64_t> ids;
    std::vector<std::uint64_t> versions;
    std::vector<unsigned char> parameters, slots;
  };
  // Returns what was updated after a version, the oldest first.
  Dump dump(Kind kind, std::uint64_t after_version) const;

  // Adds what was dumped as the newest, and drops what is too old at the version of the dump.
  void load(Kind kind, Ids ids, Versions versions, const unsigned char* parameters,
            const unsigned char* slots, std::uint64_t version);

  void clear();
  TableStats stats() const;

 private:
  struct Merged;
  // Rows and candidates.
  struct Sizes {
    std::size_t rows, candidates;
  };

  std::shared_lock<std::shared_mutex> reading() const;
  std::unique_lock<std::shared_mutex> writing();

  bool is_expired(const RowHeader& row, std::uint64_t version) const;
  std::size_t num_kept(const RowStore& store, std::uint64_t version) const;
  void expire(std::uint64_t version);
  Sizes added_by(const Merged& merged, std::uint64_t version) const;
  Sizes sizes_with(Sizes added, std::uint64_t version) const;
  std::size_t bytes_for(Sizes sizes) const;
  void make_room(Sizes sizes);
  std::size_t bytes() const { return sizeof *this + rows_.bytes() + candidates_.bytes(); }

  bool admit(std::int64_t id, std::uint64_t version);
  std::uint32_t add_row(std::int64_t id, std::uint64_t version);
  void apply(std::uint32_t row, const Rule& rule, Gradients gradients, const float* numbers);
  void write_initial(unsigned char* parameters, std::int64_t id) const;

  std::uint64_t key_of(std::int64_t id) const {
    return mix(mix(settings_.seed) ^ static_cast<std::uint64_t>(id));
  }
  float* slots_of(std::uint32_t row) const {
    return reinterpret_cast<float*>(rows_.body(row) + row_.slots_offset());
  }
  std::uint32_t& count_of(std::uint32_t candidate) const {
    return *reinterpret_cast<std::uint32_t*>(candidates_.body(candidate));
  }

  const TableSettings settings_;
  const std::size_t slot_width_;
  const Layout row_, candidate_ = {sizeof(std::uint32_t), 0};

  // Held by a writer for all that it does.
  std::mutex writer_;
  // Taken on the way to lock_: readers, one after another, would keep writers out for good.
  mutable std::mutex turn_;
  mutable std::shared_mutex lock_;
  // Guarded by lock_; a writer reads without.
  RowStore rows_, candidates_;
  TableStats counts_ = {};
};

}  // namespace pyps
