// The tables' part of the module pyps._kernels.

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <deque>
#include <string>
#include <vector>

#include "binding_arguments.h"
#include "bindings.h"
#include "isa.h"
#include "table.h"

namespace pyps {
namespace {

// A list of (ids, payload, codec, factor). Held until destruction.
class PartList {
 public:
  PartList(const py::sequence& list, std::size_t dim) {
    if (list.size() == 0) {
      throw py::value_error("parts is empty; expected at least one (ids, payload, codec, factor)");
    }
    for (const py::handle item : list) add(item, dim);
  }

  std::span<const TablePart> view() const { return parts_; }
  std::size_t num_rows() const {
    std::size_t num = 0;
    for (const TablePart& part : parts_) num += part.ids.count;
    return num;
  }

 private:
  void add(py::handle item, std::size_t dim) {
    const std::string name = "parts[" + std::to_string(parts_.size()) + "]";
    if (!py::isinstance<py::tuple>(item) || PyTuple_GET_SIZE(item.ptr()) != 4) {
      throw py::type_error(name + " is of type " + type_name(item) +
                           "; expected a tuple (ids, payload, codec, factor)");
    }
    const auto part = [&](int index) { return py::handle(PyTuple_GET_ITEM(item.ptr(), index)); };
    const Ids ids =
        held_.emplace_back(part(0), name + "'s ids").numbers<std::int64_t>("ql", "int64");
    const CodecTraits& codec = to_codec(to_number<int>(part(2), name, "codec"));
    const double factor = to_number<double>(part(3), name, "factor");
    const Bytes& payload = held_.emplace_back(part(1), name + "'s payload");
    payload.require_rows(codec, ids.count, dim);
    parts_.push_back(
        {ids, payload.data(), codec, to_float32(factor, (name + "'s factor").c_str())});
  }

  std::deque<Bytes> held_;
  std::vector<TablePart> parts_;
};

// An array that owns the numbers.
template <class Number>
py::array to_array(std::vector<Number> numbers, const char* dtype, std::vector<std::size_t> shape) {
  auto* held = new std::vector<Number>(std::move(numbers));
  const py::capsule owner(held,
                          [](void* vector) { delete static_cast<std::vector<Number>*>(vector); });
  return py::array(py::dtype(dtype), std::move(shape), held->data(), owner);
}

class BoundTable {
 public:
  explicit BoundTable(const TableSettings& settings)
      : table_(settings), numbers_(names_in(table_.rule().numbers)) {}

  const std::vector<std::string>& numbers() const { return numbers_; }

  void update(const py::sequence& parts, const py::tuple& numbers, std::uint64_t version) {
    const PartList list(parts, dim());
    const std::vector<float> values = to_float32s(numbers, numbers_, table_.rule());
    const GilReleased without_gil(list.num_rows() * dim());
    table_.update(list.view(), values.data(), version);
  }

  std::size_t bytes_with(const py::sequence& lists, std::uint64_t version) {
    std::deque<Bytes> held;
    std::vector<Ids> ids;
    for (const py::handle list : lists) {
      ids.push_back(held.emplace_back(list, "ids").numbers<std::int64_t>("ql", "int64"));
    }
    return table_.bytes_with(ids, version);
  }

  std::size_t lookup(py::handle ids, py::handle reply) const {
    const Bytes held(ids, "ids");
    const Ids wanted = held.numbers<std::int64_t>("ql", "int64");
    const ReplyPlace place(reply, dim(), wanted.count);
    if (place.view().encoded == nullptr) {
      throw py::type_error("reply is None; expected a tuple (buffer, offset, codec)");
    }
    const CodecTraits& codec = to_codec(static_cast<int>(place.view().codec));
    const GilReleased without_gil(wanted.count * dim());
    return table_.lookup(wanted, static_cast<unsigned char*>(place.view().encoded), codec);
  }

  py::tuple dump(std::uint64_t after_version, bool candidates) const {
    const Table::Kind kind = candidates ? Table::Kind::candidate : Table::Kind::row;
    Table::Dump dumped;
    {
      const GilReleased without_gil(SIZE_MAX);
      dumped = table_.dump(kind, after_version);
    }
    const bool narrow = table_.settings().codec != Codec::float32;
    const char* dtype = candidates ? "u4" : narrow ? "u2" : "f4";
    const std::size_t num = dumped.ids.size(), slots_size = table_.layout(kind).slots_size;
    const py::array ids = to_array(std::move(dumped.ids), "i8", {num});
    const py::array versions = to_array(std::move(dumped.versions), "u8", {num});
    const py::array parameters =
        to_array(std::move(dumped.parameters), dtype, {num, candidates ? 1 : dim()});
    const py::array slots =
        to_array(std::move(dumped.slots), "f4", {num, slots_size / sizeof(float)});
    return py::make_tuple(ids, versions, parameters, slots);
  }

  void load(py::handle ids, py::handle versions, py::handle parameters, py::handle slots,
            std::uint64_t version, bool candidates) {
    const Table::Kind kind = candidates ? Table::Kind::candidate : Table::Kind::row;
    const Table::Layout& layout = table_.layout(kind);
    const Bytes held[] = {
        {ids, "ids"}, {versions, "versions"}, {parameters, "parameters"}, {slots, "slots"}};
    const auto loaded = held[0].numbers<std::int64_t>("ql", "int64");
    const auto updated = held[1].numbers<std::uint64_t>("QL", "uint64");
    held[1].require_size(loaded.count * sizeof(std::uint64_t));
    if (candidates) {
      held[2].numbers<std::uint32_t>("I", "uint32");
      held[2].require_size(loaded.count * layout.parameters_size);
    } else {
      held[2].require_rows(to_codec(static_cast<int>(table_.settings().codec)), loaded.count,
                           dim());
    }
    held[3].require_rows(to_codec(1), loaded.count, layout.slots_size / sizeof(float));
    const GilReleased without_gil(loaded.count * dim());
    table_.load(kind, loaded, updated, held[2].data(), held[3].data(), version);
  }

  void clear() { table_.clear(); }

  py::dict stats() const {
    using py::arg;
    const TableStats stats = table_.stats();
    return py::dict(arg("rows") = stats.rows, arg("candidates") = stats.candidates,
                    arg("bytes") = stats.bytes, arg("admitted") = stats.admitted,
                    arg("dropped") = stats.dropped, arg("evicted") = stats.evicted,
                    arg("expired") = stats.expired, arg("version") = stats.version);
  }

 private:
  std::size_t dim() const { return table_.settings().dim; }

  Table table_;
  std::vector<std::string> numbers_;
};

const Rule& to_rule(const std::string& name) {
  const Kernels& table = kernels();
  if (const Rule* rule = find_rule(table, name); rule != nullptr) return *rule;
  std::string known;
  for (std::size_t i = 0; i < table.num_rules; ++i) known.append(table.rules[i].name).append(", ");
  for (std::size_t i = 0; i < table.rows.num_rules; ++i) known += table.rows.rules[i].name;
  throw py::value_error("rule is '" + name + "'; expected one of: " + known);
}

float to_positive(double value, const char* name) {
  if (value >= 0) return to_float32(value, name);
  throw py::value_error(std::string(name) + " is " + std::to_string(value) +
                        "; expected at least 0");
}

std::unique_ptr<BoundTable> new_table(std::size_t dim, const std::string& rule, int codec,
                                      const py::dict& slots, std::uint64_t seed, double scale,
                                      double norm_max, std::uint32_t min_count, std::uint64_t ttl,
                                      std::size_t capacity, std::size_t bytes_max) {
  if (dim < 1 || dim > dim_max) {
    throw py::value_error("dim is " + std::to_string(dim) + "; expected 1 to 1024");
  }
  const Codec held_as = to_codec(codec).codec;
  if (held_as != Codec::float32 && held_as != Codec::bfloat16) {
    throw py::value_error("codec is " + std::to_string(codec) +
                          "; rows are float32 (1) or bfloat16 (3)");
  }
  const char* names = to_rule(rule).slots;
  std::vector<float> first_slots;
  for (const std::string& name : names_in(names)) {
    if (!slots.contains(name.c_str())) {
      throw py::value_error(name + " is missing; the rule takes " + names);
    }
    const double first = to_number<double>(slots[name.c_str()], rule, name.c_str());
    first_slots.push_back(to_float32(first, name.c_str()));
  }
  return std::make_unique<BoundTable>(TableSettings{.dim = dim,
                                                    .rule = rule,
                                                    .codec = held_as,
                                                    .first_slots = std::move(first_slots),
                                                    .seed = seed,
                                                    .scale = to_positive(scale, "scale"),
                                                    .norm_max = to_positive(norm_max, "norm_max"),
                                                    .min_count = min_count,
                                                    .ttl = ttl,
                                                    .capacity = capacity,
                                                    .bytes_max = bytes_max});
}

}  // namespace

void bind_tables(py::module_& module) {
  using py::arg;
  const arg ids("ids"), versions("versions"), version("version");
  const py::arg_v candidates("candidates", false);
  py::class_<BoundTable>(module, "Table")
      .def(py::init(&new_table), arg("dim"), arg("rule"), arg("codec"), arg("slots"), py::kw_only(),
           arg("seed") = 0, arg("scale") = 0.0, arg("norm_max") = 0.0, arg("min_count") = 1,
           arg("ttl") = 0, arg("capacity") = 0, arg("bytes_max") = 0)
      .def_property_readonly("numbers", &BoundTable::numbers)
      .def("update", &BoundTable::update, arg("parts"), arg("numbers"), version)
      .def("bytes_with", &BoundTable::bytes_with, arg("ids"), version)
      .def("lookup", &BoundTable::lookup, ids, arg("reply"))
      .def("dump", &BoundTable::dump, arg("after_version"), candidates)
      .def("load", &BoundTable::load, ids, versions, arg("parameters"), arg("slots"), version,
           candidates)
      .def("clear", &BoundTable::clear)
      .def("stats", &BoundTable::stats);
}

}  // namespace pyps
