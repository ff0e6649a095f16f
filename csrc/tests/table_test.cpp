// Tables over arrays with nothing behind their last byte, of one thread and of several. The tests
// of the module pyps._kernels compare what they compute.

#include "table.h"

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "isa.h"
#include "values.h"

namespace {

using pyps::Table;

pyps::TableSettings settings_of(const std::string& rule, std::size_t dim, Codec codec) {
  pyps::TableSettings settings;
  settings.dim = dim;
  settings.rule = rule;
  settings.bfloat16 = codec == Codec::bfloat16;
  settings.scale = 0.5f;
  const std::string_view names = pyps::find_rule(pyps::kernels(), rule)->slots;
  const auto num = static_cast<std::size_t>(std::count(names.begin(), names.end(), ',')) + 1;
  settings.first_slots.assign(names.empty() ? 0 : num, 0.1f);
  return settings;
}

// Ids or versions at an odd address, with the bytes that they lie in.
template <class Number>
struct Column {
  Payload bytes;
  pyps::Packed<Number> numbers;

  explicit Column(const std::vector<Number>& values)
      : bytes(values.size() * sizeof(Number), 3), numbers{bytes.data(), values.size()} {
    if (!values.empty()) std::memcpy(bytes.data(), values.data(), values.size() * sizeof(Number));
  }
};

// Every `step`-th id from `first` on, each row with the same gradient.
void update(Table& table, std::int64_t first, std::int64_t step, std::size_t num,
            const pyps::CodecTraits& codec, std::uint64_t version) {
  std::vector<std::int64_t> ids;
  for (std::size_t i = 0; i < num; ++i) ids.push_back(first + step * static_cast<int>(i));
  const Column<std::int64_t> column(ids);
  const std::size_t dim = table.settings().dim, stride = codec.bytes_of(dim);
  Payload payload(num * stride, 1);
  for (std::size_t i = 0; i < num; ++i) {
    pyps::kernels().encode(payload.data() + i * stride, random_values(dim, 1).data(), codec.codec,
                           dim);
  }
  const std::vector<float> numbers(16, 0.5f);
  const pyps::TablePart part = {column.numbers, payload.data(), codec, 0.5f};
  const pyps::TablePart parts[] = {part, part};
  table.update(parts, numbers.data(), version);
}

std::size_t lookup(const Table& table, std::int64_t end, const pyps::CodecTraits& codec) {
  std::vector<std::int64_t> ids;
  for (std::int64_t id = end; id-- > -9;) ids.push_back(id);
  Payload reply(ids.size() * codec.bytes_of(table.settings().dim), 5);
  return table.lookup(Column<std::int64_t>(ids).numbers, reply.data(), codec);
}

// Dumps everything and loads it into a new table.
void test_copy(const Table& table) {
  const pyps::TableStats stats = table.stats();
  Table copy(table.settings());
  for (const bool candidates : {false, true}) {
    const Table::Dump dump = table.dump(candidates, 0);
    const pyps::RowStore& store = table.store(candidates);
    const std::size_t num = candidates ? stats.candidates : stats.rows;
    CHECK(dump.ids.size() == num && dump.versions.size() == num);
    CHECK(dump.parameters.size() == num * store.parameters_size);
    CHECK(dump.slots.size() == num * store.slots_size);
    copy.load(candidates, Column(dump.ids).numbers, Column(dump.versions).numbers,
              dump.parameters.data(), dump.slots.data(), stats.version);
  }
  CHECK(copy.stats().rows == stats.rows && copy.stats().candidates == stats.candidates);
}

void test_table(const std::string& rule, std::size_t dim, Codec codec) {
  pyps::TableSettings settings = settings_of(rule, dim, codec);
  for (const std::uint32_t min_count : {1u, 3u}) {
    settings.norm_max = 1.0f;
    settings.min_count = min_count;
    settings.ttl = min_count == 1 ? 0 : 6;
    settings.capacity = min_count == 1 ? 0 : 700;
    Table table(settings);
    std::uint64_t version = 0;
    for (const pyps::CodecTraits& each : pyps::all_codecs()) {
      for (int i = 1; i < 4; ++i) update(table, -i, i, 600, each, ++version);
      const std::size_t known = lookup(table, 500, each);
      CHECK(min_count > 1 || known == 503);
    }
    test_copy(table);
  }
}

void test_threads() {
  Table table(settings_of("rowwise_adagrad", 16, Codec::float32));
  const pyps::CodecTraits& codec = pyps::all_codecs()[0];
  std::vector<std::thread> threads;
  for (int k = 0; k < 2; ++k) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) lookup(table, 3000, codec);
    });
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        try {
          update(table, i, 3, 600, codec, table.stats().version + 1);
        } catch (const std::invalid_argument&) {
          // The other thread took this version.
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(table.stats().version >= 50);
}

}  // namespace

void test_tables() {
  for (const std::string& isa : pyps::available_isas()) {
    pyps::select_isa(isa);
    for (const Codec codec : {Codec::float32, Codec::bfloat16}) {
      for (const std::size_t dim : {1u, 31u, 64u, 1024u}) {
        for (const char* rule : {"rowwise_adagrad", "adam", "assign"}) test_table(rule, dim, codec);
      }
    }
  }
  test_threads();
}
