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

// Calls use(i, row or none) for each id, a few at a time under a lock.
template <bool renews, class Lock, class Use>
void for_each_row(const RowStore& store, Ids ids, std::size_t fetched, Lock lock, Use use) {
  for (std::size_t start = 0; start < ids.count; start += piece_max) {
    const auto held = lock();
    store.for_each<renews>(ids.piece(start, piece_max), fetched,
                           [&](std::size_t i, std::uint32_t row) { use(start + i, row); });
  }
}

// The ids of all parts, each once, in ascending order.
std::vector<std::int64_t> merged_ids(std::span<const TablePart> parts) {
  std::vector<std::int64_t> ids;
  for (const TablePart& part : parts) {
    const auto num_before = static_cast<std::ptrdiff_t>(ids.size());
    for (std::size_t i = 0; i < part.ids.count; ++i) ids.push_back(part.ids[i]);
    std::inplace_merge(ids.begin(), ids.begin() + num_before, ids.end());
  }
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

}  // namespace

const Rule* find_rule(const Kernels& table, const std::string& name) {
  const Rule* rule = find_in(table, name);
  return rule != nullptr ? rule : find_in(table.rows, name);
}

// The index spreads ids by other bits than initial values, or servers, do.
Table::Table(const TableSettings& settings)
    : settings_(settings),
      slot_width_(find_in(kernels().rows, settings.rule) != nullptr ? 1 : settings.dim),
      rows_(settings.dim * (settings.bfloat16 ? 2 : 4),
            settings.first_slots.size() * slot_width_ * sizeof(float), mix(~settings.seed)),
      candidates_(sizeof(std::uint32_t), 0, mix(~settings.seed)) {}

void Table::update(std::span<const TablePart> parts, const float* numbers, std::uint64_t version) {
  const std::vector<std::int64_t> merged = merged_ids(parts);
  const Ids ids = {reinterpret_cast<const unsigned char*>(merged.data()), merged.size()};
  // The rows of each part that were applied.
  std::vector<std::size_t> taken(parts.size());
  std::vector<Gradient> gradients;
  gradients.reserve(parts.size());
  const std::lock_guard writer(writer_);
  if (version <= counts_.version) {
    throw std::invalid_argument("version is " + std::to_string(version) + "; the table is at " +
                                std::to_string(counts_.version));
  }
  Sizes most = sizes_with(ids.count);
  if (!rows_.has_room(most.rows) || !candidates_.has_room(most.candidates)) {
    most = sizes_with(num_new(ids, version));
  }
  {
    const auto lock = writing();
    rows_.reserve(most.rows);
    candidates_.reserve(most.candidates);
  }
  expire(version);
  const Rule& rule = this->rule();
  const auto use = [&](std::size_t i, std::uint32_t row) {
    gradients.clear();
    for (std::size_t k = 0; k < parts.size(); ++k) {
      const auto& [part_ids, payload, codec, factor] = parts[k];
      if (taken[k] == part_ids.count || part_ids[taken[k]] != merged[i]) continue;
      const unsigned char* gradient = payload + taken[k]++ * codec.bytes_of(settings_.dim);
      gradients.push_back({gradient, codec.codec, factor});
    }
    // Of ids that do not ascend.
    if (gradients.empty()) return;
    if (row != RowStore::none) {
      rows_.renew(row, version);
    } else if (admit(merged[i], version)) {
      row = add_row(merged[i], version);
    } else {
      return;
    }
    apply(row, rule, {gradients.data(), gradients.size()}, numbers);
  };
  for_each_row<true>(
      rows_, ids, rows_.parameters_size + rows_.slots_size, [this] { return writing(); }, use);
  const auto lock = writing();
  counts_.version = version;
}

std::size_t Table::bytes_with(std::span<const Ids> lists, std::uint64_t version) {
  const std::lock_guard writer(writer_);
  std::size_t num = 0;
  for (const Ids& ids : lists) num += num_new(ids, version);
  const Sizes sizes = sizes_with(num);
  return rows_.bytes_for(sizes.rows) + candidates_.bytes_for(sizes.candidates);
}

std::size_t Table::lookup(Ids ids, unsigned char* encoded, const CodecTraits& codec) const {
  const Kernels& table = kernels();
  const std::size_t dim = settings_.dim, stride = codec.bytes_of(dim);
  alignas(float) unsigned char initial[dim_max * sizeof(float)];
  float decoded[dim_max];
  std::size_t known = 0;
  const auto use = [&](std::size_t i, std::uint32_t row) {
    unsigned char* to = encoded + i * stride;
    const unsigned char* parameters = initial;
    if (row != RowStore::none) {
      parameters = rows_.parameters(row);
      ++known;
    } else {
      write_initial(initial, ids[i]);
    }
    if (codec.codec == this->codec()) {
      std::memcpy(to, parameters, stride);
    } else {
      table.decode(decoded, parameters, this->codec(), dim);
      table.encode(to, decoded, codec.codec, dim);
    }
  };
  for_each_row<false>(rows_, ids, rows_.parameters_size, [this] { return reading(); }, use);
  return known;
}

Table::Dump Table::dump(bool candidates, std::uint64_t after_version) const {
  const RowStore& rows = store(candidates);
  const auto lock = reading();
  std::size_t num = 0;
  std::uint32_t first = RowStore::none;
  for (std::uint32_t row = rows.newest();
       row != RowStore::none && rows.header(row).version > after_version;
       row = rows.header(row).older) {
    first = row;
    ++num;
  }
  Dump out;
  out.ids.reserve(num);
  out.versions.reserve(num);
  out.parameters.reserve(num * rows.parameters_size);
  out.slots.reserve(num * rows.slots_size);
  for (std::uint32_t row = first; row != RowStore::none; row = rows.header(row).newer) {
    out.ids.push_back(rows.header(row).id);
    out.versions.push_back(rows.header(row).version);
    const unsigned char *parameters = rows.parameters(row), *slots = rows.slots(row);
    out.parameters.insert(out.parameters.end(), parameters, parameters + rows.parameters_size);
    out.slots.insert(out.slots.end(), slots, slots + rows.slots_size);
  }
  return out;
}

void Table::load(bool candidates, Ids ids, Versions versions, const unsigned char* parameters,
                 const unsigned char* slots, std::uint64_t version) {
  RowStore& rows = candidates ? candidates_ : rows_;
  const std::lock_guard writer(writer_);
  if (rows.size() != 0) throw std::invalid_argument("the table has rows already");
  for (std::size_t i = 0; i < ids.count; ++i) {
    const std::uint64_t least = i == 0 ? 0 : versions[i - 1];
    if (least <= versions[i] && versions[i] <= version) continue;
    throw std::invalid_argument("versions[" + std::to_string(i) + "] is " +
                                std::to_string(versions[i]) + "; expected " +
                                std::to_string(least) + " to " + std::to_string(version));
  }
  const auto lock = writing();
  rows.reserve(ids.count);
  for (std::size_t i = 0; i < ids.count; ++i) {
    if (rows.find(ids[i]) != RowStore::none) {
      throw std::invalid_argument("id " + std::to_string(ids[i]) + " is there twice");
    }
    const std::uint32_t row = rows.insert(ids[i], versions[i]);
    std::copy_n(parameters + i * rows.parameters_size, rows.parameters_size, rows.parameters(row));
    std::copy_n(slots + i * rows.slots_size, rows.slots_size, rows.slots(row));
  }
  counts_.version = std::max(version, counts_.version);
}

TableStats Table::stats() const {
  const auto lock = reading();
  TableStats stats = counts_;
  stats.rows = rows_.size();
  stats.candidates = candidates_.size();
  stats.bytes = rows_.bytes_for(stats.rows) + candidates_.bytes_for(stats.candidates);
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

void Table::expire(std::uint64_t version) {
  for (RowStore* store : {&rows_, &candidates_}) {
    while (store->size() != 0 && is_expired(store->header(store->oldest()), version)) {
      const auto lock = writing();
      store->erase(store->oldest());
      ++counts_.expired;
    }
  }
}

// The ids that have no row at a version, each as often as it is there.
std::size_t Table::num_new(Ids ids, std::uint64_t version) const {
  std::size_t num = 0;
  rows_.for_each<false>(ids, 0, [&](std::size_t, std::uint32_t row) {
    num += row == RowStore::none || is_expired(rows_.header(row), version);
  });
  return num;
}

// The most rows and candidates that there may be after an update with so many new ids.
Table::Sizes Table::sizes_with(std::size_t num_new) const {
  Sizes sizes = {rows_.size() + num_new, candidates_.size()};
  if (settings_.min_count > 1) sizes.candidates += num_new;
  if (settings_.capacity != 0 && sizes.rows > settings_.capacity) {
    // A row that makes way for another may come again, as a candidate.
    if (settings_.min_count > 1) sizes.candidates += sizes.rows - settings_.capacity;
    sizes.rows = settings_.capacity;
  }
  return sizes;
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
  write_initial(rows_.parameters(row), id);
  float* slots = slots_of(row);
  for (const float first : settings_.first_slots) slots = std::fill_n(slots, slot_width_, first);
  return row;
}

void Table::apply(std::uint32_t row, const Rule& rule, Gradients gradients, const float* numbers) {
  const Kernels& table = kernels();
  const std::size_t dim = settings_.dim;
  float decoded[dim_max];
  float* parameters =
      settings_.bfloat16 ? decoded : reinterpret_cast<float*>(rows_.parameters(row));
  if (settings_.bfloat16) table.decode(decoded, rows_.parameters(row), codec(), dim);
  float* const arrays[] = {parameters, slots_of(row), slots_of(row) + slot_width_};
  rule.update(arrays, gradients, {}, dim, numbers);
  if (settings_.norm_max != 0) {
    const double norm = std::sqrt(table.vectors.dot(parameters, parameters, dim));
    const double ratio = double{settings_.norm_max} / norm;
    for (std::size_t i = 0; ratio < 1 && i < dim; ++i) {
      parameters[i] = static_cast<float>(double{parameters[i]} * ratio);
    }
  }
  if (settings_.bfloat16) {
    const auto [id, version, older, newer] = rows_.header(row);
    table.rows.round(rows_.parameters(row), decoded, mix(key_of(id) + mix(version)), dim);
  }
}

void Table::write_initial(unsigned char* parameters, std::int64_t id) const {
  float values[dim_max];
  kernels().rows.initial(values, key_of(id), settings_.scale, settings_.dim);
  kernels().encode(parameters, values, codec(), settings_.dim);
}

}  // namespace pyps
