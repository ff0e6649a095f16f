// A table: rows of numbers by their ids. A row comes to be at its first update.
//
// Before that it is its initial value, a function of seed, id and column. So a lookup changes
// nothing, and a table is a function of its updates, to the bit on every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <string>
#include <vector>

#include "isa.h"
#include "kernels.h"
#include "table_rows.h"

namespace pyps {

constexpr std::size_t dim_max = 1024;

// _kernels.pyi says what each is; 0 is for none.
struct TableSettings {
  std::size_t dim = 1;
  std::string rule;
  std::vector<float> first_slots;
  bool bfloat16 = false;
  std::uint64_t seed = 0;
  float scale = 0;
  float norm_max = 0;
  std::uint32_t min_count = 0;
  std::uint64_t ttl = 0;
  std::size_t capacity = 0;
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
// a time, so that these see whole rows; while the index grows, for that long. Bad arguments are
// std::invalid_argument; what is refused,
// or finds no memory, changes nothing.
class Table {
 public:
  // The rule must be known, and the dimension one that is allowed.
  explicit Table(const TableSettings& settings);

  const TableSettings& settings() const { return settings_; }
  const Rule& rule() const { return *find_rule(kernels(), settings_.rule); }

  // The rows, or the candidates: ids on their way to become rows, of which a count is held instead
  // of parameters. Of what is returned only the sizes may be read.
  const RowStore& store(bool candidates) const { return candidates ? candidates_ : rows_; }

  // Applies the weighted sum of the parts that have it to each row, under a version above the last.
  void update(std::span<const TablePart> parts, const float* numbers, std::uint64_t version);

  // The most bytes of the table after updates with these ids that begin at a version; as many as
  // now where all of them have rows.
  std::size_t bytes_with(std::span<const Ids> lists, std::uint64_t version);

  // Writes rows, each encoded by itself; returns how many of them are more than initial.
  std::size_t lookup(Ids ids, unsigned char* encoded, const CodecTraits& codec) const;

  struct Dump {
    std::vector<std::int64_t> ids;
    std::vector<std::uint64_t> versions;
    std::vector<unsigned char> parameters, slots;
  };
  // Returns what was updated after a version, the oldest first.
  Dump dump(bool candidates, std::uint64_t after_version) const;

  // Puts what was dumped at a version into a table without any; after an error it is of no use.
  void load(bool candidates, Ids ids, Versions versions, const unsigned char* parameters,
            const unsigned char* slots, std::uint64_t version);

  TableStats stats() const;

 private:
  // Rows and candidates.
  struct Sizes {
    std::size_t rows, candidates;
  };

  std::shared_lock<std::shared_mutex> reading() const;
  std::unique_lock<std::shared_mutex> writing();

  bool is_expired(const RowHeader& row, std::uint64_t version) const {
    return settings_.ttl != 0 && version - row.version > settings_.ttl;
  }
  void expire(std::uint64_t version);
  std::size_t num_new(Ids ids, std::uint64_t version) const;
  Sizes sizes_with(std::size_t num_new) const;

  bool admit(std::int64_t id, std::uint64_t version);
  std::uint32_t add_row(std::int64_t id, std::uint64_t version);
  void apply(std::uint32_t row, const Rule& rule, Gradients gradients, const float* numbers);
  void write_initial(unsigned char* parameters, std::int64_t id) const;

  Codec codec() const { return settings_.bfloat16 ? Codec::bfloat16 : Codec::float32; }
  std::uint64_t key_of(std::int64_t id) const {
    return mix(mix(settings_.seed) ^ static_cast<std::uint64_t>(id));
  }
  float* slots_of(std::uint32_t row) const { return reinterpret_cast<float*>(rows_.slots(row)); }
  std::uint32_t& count_of(std::uint32_t candidate) const {
    return *reinterpret_cast<std::uint32_t*>(candidates_.parameters(candidate));
  }

  const TableSettings settings_;
  const std::size_t slot_width_;

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
