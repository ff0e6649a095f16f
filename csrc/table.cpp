#include "table.h"

#include <cmath>

namespace pyps {
namespace {

// Rows that a writer changes or a reader reads before others have their turn.
constexpr std::size_t piece_max = 256;

template <class Rules>
const Rule* find_in(const Rules& rules, const std::string& name) {
  for (std::size_t i = 0; i < rules.num_rules; ++i) {
    if (name == rules.rules[i].name) return &rules.rules[i];
  }
  return nullptr;
}

class TableFull : public std::bad_alloc {
 public:
  TableFull(std::size_t held, std::size_t needed, std::size_t allowed)
      : message_("the table holds " + std::to_string(held) + " bytes and needs " +
                 std::to_string(needed) + "; it may hold " + std::to_string(allowed)) {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

// Calls body(ids, start) for pieces of the ids.
template <class Body>
void for_each_piece(Ids ids, Body body) {
  std::int64_t piece[piece_max];
  for (std::size_t start = 0; start < ids.count; start += piece_max) {
    const std::size_t size = std::min(piece_max, ids.count - start);
    std::memcpy(piece, ids.first + start * sizeof *piece, size * sizeof *piece);
    body(std::span<const std::int64_t>(piece, size), start);
  }
}

}  // namespace

const Rule* find_rule(const Kernels& table, const std::string& name) {
  const Rule* rule = find_in(table, name);
  return rule != nullptr ? rule : find_in(table.rows, name);
}

// The ids of all parts, each once, in ascending order; gradients from starts[i] on are those of
// ids[i], in the order of the parts.
struct Table::Merged {
  std::vector<std::int64_t> ids;
  std::vector<std::size_t> starts;
  std::vector<Gradient> gradients;

  Merged(std::span<const TablePart> parts, std::size_t dim) {
    std::size_t num = 0;
    for (std::size_t k = 0; k < parts.size(); ++k) {
      require_ascending(parts[k].ids, k);
      num += parts[k].ids.count;
    }
    ids.reserve(num);
    starts.reserve(num + 1);
    gradients.reserve(num);
    std::vector<std::size_t> taken(parts.size());
    while (gradients.size() < num) {
      std::int64_t least = INT64_MAX;
      for (std::size_t k = 0; k < parts.size(); ++k) {
        if (taken[k] < parts[k].ids.count) least = std::min(least, parts[k].ids[taken[k]]);
      }
      ids.push_back(least);
      starts.push_back(gradients.size());
      for (std::size_t k = 0; k < parts.size(); ++k) {
        const auto& [part_ids, payload, codec, factor] = parts[k];
        if (taken[k] == part_ids.count || part_ids[taken[k]] != least) continue;
        gradients.push_back({payload + taken[k]++ * codec.bytes_of(dim), codec.codec, factor});
      }
    }
    starts.push_back(num);
  }

  static void require_ascending(Ids ids, std::size_t part) {
    for (std::size_t i = 1; i < ids.count; ++i) {
      if (ids[i - 1] < ids[i]) continue;
      throw std::invalid_argument("parts[" + std::to_string(part) +
                                  "]'s ids do not ascend: " + std::to_string(ids[i]) + " follows " +
                                  std::to_string(ids[i - 1]));
    }
  }

  Gradients gradients_of(std::size_t i) const {
    return {.first = &gradients[starts[i]], .num = starts[i + 1] - starts[i]};
  }
};

// The index spreads ids by other bits than initial values, or servers, do.
Table::Table(const TableSettings& settings)
    : settings_(settings),
      slot_width_(find_in(kernels().rows, settings.rule) != nullptr ? 1 : settings.dim),
      row_{settings.dim * (settings.codec == Codec::float32 ? 4 : 2),
           settings.first_slots.size() * slot_width_ * sizeof(float)},
      rows_(row_.size(), mix(~settings.seed)),
      candidates_(candidate_.size(), mix(~settings.seed)) {}

void Table::update(std::span<const TablePart> parts, const float* numbers, std::uint64_t version) {
  const Merged merged(parts, settings_.dim);
  const std::span<const std::int64_t> ids = merged.ids;
  const std::lock_guard writer(writer_);
  if (version <= counts_.version) {
    throw std::invalid_argument("version is " + std::to_string(version) + "; the table is at " +
                                std::to_string(counts_.version));
  }
  const Sizes most = sizes_with({ids.size(), settings_.min_count > 1 ? ids.size() : 0}, version);
  if (!rows_.has_room(most.rows) || !candidates_.has_room(most.candidates)) {
    make_room(sizes_with(added_by(merged, version), version));
  }
  expire(version);
  const Rule& rule = this->rule();
  for (std::size_t start = 0; start < ids.size(); start += piece_max) {
    const std::span piece = ids.subspan(start, std::min(piece_max, ids.size() - start));
    const auto lock = writing();
    const auto use = [&](std::size_t i, std::uint32_t row) {
      if (row != RowStore::none) {
        rows_.renew(row, version);
      } else if (admit(piece[i], version)) {
        row = add_row(piece[i], version);
      } else {
        return;
      }
      apply(row, rule, merged.gradients_of(start + i), numbers);
    };
    rows_.for_each<true>(piece, row_.size(), use);
  }
  const auto lock = writing();
  counts_.version = version;
}

std::size_t Table::bytes_with(std::span<const Ids> lists, std::uint64_t version) {
  std::vector<TablePart> parts;
  // Of gradients nothing is read.
  for (const Ids& ids : lists) parts.push_back({ids, ids.first, all_codecs()[0], 0.0f});
  const Merged merged(parts, settings_.dim);
  const std::lock_guard writer(writer_);
  const std::size_t num = merged.ids.size();
  const Sizes most = sizes_with({num, settings_.min_count > 1 ? num : 0}, version);
  if (rows_.has_room(most.rows) && candidates_.has_room(most.candidates)) return bytes();
  return std::max(bytes(), bytes_for(sizes_with(added_by(merged, version), version)));
}

std::size_t Table::lookup(Ids ids, unsigned char* encoded, const CodecTraits& codec) const {
  const Kernels& table = kernels();
  const std::size_t dim = settings_.dim, stride = codec.bytes_of(dim);
  alignas(float) unsigned char initial[dim_max * sizeof(float)];
  float decoded[dim_max];
  std::size_t known = 0;
  for_each_piece(ids, [&](std::span<const std::int64_t> piece, std::size_t start) {
    const auto lock = reading();
    rows_.for_each<false>(piece, row_.parameters_size, [&](std::size_t i, std::uint32_t row) {
      unsigned char* to = encoded + (start + i) * stride;
      const unsigned char* parameters = initial;
      if (row != RowStore::none) {
        parameters = rows_.body(row);
        ++known;
      } else {
        write_initial(initial, piece[i]);
      }
      if (codec.codec == settings_.codec) {
        std::memcpy(to, parameters, stride);
      } else {
        table.decode(decoded, parameters, settings_.codec, dim);
        table.encode(to, decoded, codec.codec, dim);
      }
    });
  });
  return known;
}

Table::Dump Table::dump(Kind kind, std::uint64_t after_version) const {
  const RowStore& store = kind == Kind::row ? rows_ : candidates_;
  const auto [size, slots_size] = layout(kind);
  const auto lock = reading();
  std::size_t num = 0;
  std::uint32_t first = RowStore::none;
  for (std::uint32_t row = store.newest();
       row != RowStore::none && store.header(row).version > after_version;
       row = store.header(row).older) {
    first = row;
    ++num;
  }
  Dump out;
  out.ids.reserve(num);
  out.versions.reserve(num);
  out.parameters.reserve(num * size);
  out.slots.reserve(num * slots_size);
  for (std::uint32_t row = first; row != RowStore::none; row = store.header(row).newer) {
    out.ids.push_back(store.header(row).id);
    out.versions.push_back(store.header(row).version);
    const unsigned char* parameters = store.body(row);
    out.parameters.insert(out.parameters.end(), parameters, parameters + size);
    const unsigned char* slots = parameters + layout(kind).slots_offset();
    out.slots.insert(out.slots.end(), slots, slots + slots_size);
  }
  return out;
}

void Table::load(Kind kind, Ids ids, Versions versions, const unsigned char* parameters,
                 const unsigned char* slots, std::uint64_t version) {
  const bool is_row = kind == Kind::row;
  RowStore& store = is_row ? rows_ : candidates_;
  RowStore& other = is_row ? candidates_ : rows_;
  const auto [size, slots_size] = layout(kind);
  const std::lock_guard writer(writer_);
  std::uint64_t last = store.size() == 0 ? 0 : store.header(store.newest()).version;
  std::size_t added = 0;
  for (std::size_t i = 0; i < ids.count; last = versions[i++]) {
    if (versions[i] < last || versions[i] > version) {
      throw std::invalid_argument("versions[" + std::to_string(i) + "] is " +
                                  std::to_string(versions[i]) + "; expected " +
                                  std::to_string(last) + " to " + std::to_string(version));
    }
    added += store.find(ids[i]) == RowStore::none;
  }
  version = std::max(version, counts_.version);
  make_room(sizes_with({is_row ? added : 0, is_row ? 0 : added}, counts_.version));
  for_each_piece(ids, [&](std::span<const std::int64_t> piece, std::size_t start) {
    const auto lock = writing();
    store.for_each<true>(piece, 0, [&](std::size_t i, std::uint32_t row) {
      const std::size_t at = start + i;
      if (row == RowStore::none) {
        // What was loaded before and is now of the other kind.
        if (const std::uint32_t old = other.find(piece[i]); old != RowStore::none) other.erase(old);
        row = is_row ? add_row(piece[i], versions[at]) : store.insert(piece[i], versions[at]);
      } else {
        store.renew(row, versions[at]);
      }
      std::copy_n(parameters + at * size, size, store.body(row));
      std::copy_n(slots + at * slots_size, slots_size,
                  store.body(row) + layout(kind).slots_offset());
    });
  });
  expire(version);
  const auto lock = writing();
  counts_.version = version;
}

void Table::clear() {
  const std::lock_guard writer(writer_);
  const auto lock = writing();
  rows_ = rows_.emptied();
  candidates_ = candidates_.emptied();
  counts_ = {};
}

TableStats Table::stats() const {
  const auto lock = reading();
  TableStats stats = counts_;
  stats.rows = rows_.size();
  stats.candidates = candidates_.size();
  stats.bytes = bytes();
  return stats;
}

std::shared_lock<std::shared_mutex> Table::reading() const {
  const std::lock_guard turn(turn_);
  return std::shared_lock(lock_);
}

std::unique_lock<std::shared_mutex> Table::writing() {
  const std::lock_guard turn(turn_);
  return std::unique_lock(lock_);
}

bool Table::is_expired(const RowHeader& row, std::uint64_t version) const {
  return settings_.ttl != 0 && version - row.version > settings_.ttl;
}

std::size_t Table::num_kept(const RowStore& store, std::uint64_t version) const {
  std::size_t num = store.size();
  for (std::uint32_t row = store.oldest();
       row != RowStore::none && is_expired(store.header(row), version);
       row = store.header(row).newer) {
    --num;
  }
  return num;
}

void Table::expire(std::uint64_t version) {
  for (RowStore* store : {&rows_, &candidates_}) {
    while (store->size() != 0 && is_expired(store->header(store->oldest()), version)) {
      const auto lock = writing();
      store->erase(store->oldest());
      ++counts_.expired;
    }
  }
}

Table::Sizes Table::added_by(const Merged& merged, std::uint64_t version) const {
  const auto stands = [&](const RowStore& store, std::uint32_t row) {
    return row != RowStore::none && !is_expired(store.header(row), version);
  };
  Sizes added = {};
  rows_.for_each<false>(merged.ids, 0, [&](std::size_t i, std::uint32_t row) {
    if (stands(rows_, row)) return;
    const std::uint32_t candidate = candidates_.find(merged.ids[i]);
    const std::uint32_t count = stands(candidates_, candidate) ? count_of(candidate) : 0;
    added.rows += count + 1 >= settings_.min_count;
    added.candidates += count == 0 && settings_.min_count > 1;
  });
  return added;
}

Table::Sizes Table::sizes_with(Sizes added, std::uint64_t version) const {
  Sizes sizes = {num_kept(rows_, version) + added.rows,
                 num_kept(candidates_, version) + added.candidates};
  if (settings_.capacity != 0 && sizes.rows > settings_.capacity) {
    // A row that makes way for another may come again, as a candidate.
    if (settings_.min_count > 1) sizes.candidates += sizes.rows - settings_.capacity;
    sizes.rows = settings_.capacity;
  }
  return sizes;
}

std::size_t Table::bytes_for(Sizes sizes) const {
  return sizeof *this + rows_.bytes_for(sizes.rows) + candidates_.bytes_for(sizes.candidates);
}

void Table::make_room(Sizes sizes) {
  const std::size_t needed = bytes_for(sizes);
  const std::size_t allowed = settings_.bytes_max != 0 ? settings_.bytes_max : SIZE_MAX;
  if (needed > allowed) throw TableFull(bytes(), needed, allowed);
  RowStore::Growth rows = rows_.grow(sizes.rows, allowed - needed);
  RowStore::Growth candidates = candidates_.grow(sizes.candidates, 0);
  const auto lock = writing();
  rows_.adopt(std::move(rows));
  candidates_.adopt(std::move(candidates));
}

// Counts an update of an id that has no row; whether it becomes one.
bool Table::admit(std::int64_t id, std::uint64_t version) {
  if (settings_.min_count > 1) {
    std::uint32_t candidate = candidates_.find(id);
    if (candidate == RowStore::none) {
      candidate = candidates_.insert(id, version);
      count_of(candidate) = 0;
    }
    if (++count_of(candidate) < settings_.min_count) {
      candidates_.renew(candidate, version);
      ++counts_.dropped;
      return false;
    }
    candidates_.erase(candidate);
  }
  ++counts_.admitted;
  return true;
}

std::uint32_t Table::add_row(std::int64_t id, std::uint64_t version) {
  if (settings_.capacity != 0 && rows_.size() == settings_.capacity) {
    rows_.erase(rows_.oldest());
    ++counts_.evicted;
  }
  const std::uint32_t row = rows_.insert(id, version);
  write_initial(rows_.body(row), id);
  float* slots = slots_of(row);
  for (const float first : settings_.first_slots) slots = std::fill_n(slots, slot_width_, first);
  return row;
}

void Table::apply(std::uint32_t row, const Rule& rule, Gradients gradients, const float* numbers) {
  const Kernels& table = kernels();
  const std::size_t dim = settings_.dim;
  const bool narrow = settings_.codec != Codec::float32;
  float decoded[dim_max];
  float* parameters = narrow ? decoded : reinterpret_cast<float*>(rows_.body(row));
  if (narrow) table.decode(decoded, rows_.body(row), settings_.codec, dim);
  float* const arrays[] = {parameters, slots_of(row), slots_of(row) + slot_width_};
  rule.update(arrays, gradients, {}, dim, numbers);
  if (settings_.norm_max != 0) {
    const double norm = std::sqrt(table.vectors.dot(parameters, parameters, dim));
    const double ratio = double{settings_.norm_max} / norm;
    for (std::size_t i = 0; ratio < 1 && i < dim; ++i) {
      parameters[i] = static_cast<float>(double{parameters[i]} * ratio);
    }
  }
  if (narrow) {
    const auto [id, version, older, newer] = rows_.header(row);
    table.rows.round(rows_.body(row), decoded, mix(key_of(id) + mix(version)), dim);
  }
}

void Table::write_initial(unsigned char* parameters, std::int64_t id) const {
  float values[dim_max];
  kernels().rows.initial(values, key_of(id), settings_.scale, settings_.dim);
  kernels().encode(parameters, values, settings_.codec, settings_.dim);
}

}  // namespace pyps
