// The tables' part of the module pyps._kernels.

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <deque>
#include <string>
#include <tuple>
#include <vector>

#include "binding_arguments.h"
#include "bindings.h"
#include "isa.h"
#include "table.h"

namespace pyps {
namespace {

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
  explicit BoundTable(const TableSettings& settings) : table_(settings) {}

  std::vector<std::string> numbers() const { return names_in(table_.rule().numbers); }

  void update(const std::vector<std::tuple<py::object, py::object, int, float>>& parts,
              const py::tuple& numbers, std::uint64_t version) {
    std::deque<Bytes> held;
    std::vector<TablePart> list;
    std::size_t num_rows = 0;
    for (const auto& [ids, payload, codec, factor] : parts) {
      const Ids updated = held.emplace_back(ids, "ids").numbers<std::int64_t>("ql", "int64");
      const Bytes& gradients = held.emplace_back(payload, "payload");
      gradients.require_rows(to_codec(codec), updated.count, dim());
      list.push_back({updated, gradients.data(), to_codec(codec), factor});
      num_rows += updated.count;
    }
    const std::vector<float> values = to_float32s(numbers, this->numbers(), table_.rule());
    const GilReleased without_gil(num_rows * dim());
    table_.update(list, values.data(), version);
  }

  std::size_t bytes_with(const std::vector<py::object>& lists, std::uint64_t version) {
    std::deque<Bytes> held;
    std::vector<Ids> ids;
    std::size_t num_ids = 0;
    for (const py::object& list : lists) {
      ids.push_back(held.emplace_back(list, "ids").numbers<std::int64_t>("ql", "int64"));
      num_ids += ids.back().count;
    }
    const GilReleased without_gil(num_ids);
    return table_.bytes_with(ids, version);
  }

  std::size_t lookup(py::handle ids, const py::tuple& reply) const {
    const Bytes held(ids, "ids");
    const Ids wanted = held.numbers<std::int64_t>("ql", "int64");
    const ReplyPlace place(reply, dim(), wanted.count);
    const CodecTraits& codec = to_codec(static_cast<int>(place.view().codec));
    const GilReleased without_gil(wanted.count * dim());
    return table_.lookup(wanted, static_cast<unsigned char*>(place.view().encoded), codec);
  }

  py::tuple dump(std::uint64_t after_version, bool candidates) const {
    Table::Dump dumped;
    {
      const GilReleased without_gil(SIZE_MAX);
      dumped = table_.dump(candidates, after_version);
    }
    const char* dtype = candidates ? "u4" : table_.settings().bfloat16 ? "u2" : "f4";
    const std::size_t num = dumped.ids.size();
    const std::size_t num_slots = table_.store(candidates).slots_size / sizeof(float);
    return py::make_tuple(
        to_array(std::move(dumped.ids), "i8", {num}),
        to_array(std::move(dumped.versions), "u8", {num}),
        to_array(std::move(dumped.parameters), dtype, {num, candidates ? 1 : dim()}),
        to_array(std::move(dumped.slots), "f4", {num, num_slots}));
  }

  void load(py::handle ids, py::handle versions, py::handle parameters, py::handle slots,
            std::uint64_t version, bool candidates) {
    const Bytes held[] = {
        {ids, "ids"}, {versions, "versions"}, {parameters, "parameters"}, {slots, "slots"}};
    const auto loaded = held[0].numbers<std::int64_t>("ql", "int64");
    const auto updated = held[1].numbers<std::uint64_t>("QL", "uint64");
    const RowStore& store = table_.store(candidates);
    held[1].require_size(loaded.count * sizeof(std::uint64_t));
    held[2].require_size(loaded.count * store.parameters_size);
    held[3].require_size(loaded.count * store.slots_size);
    const GilReleased without_gil(loaded.count * dim());
    table_.load(candidates, loaded, updated, held[2].data(), held[3].data(), version);
  }

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
};

std::unique_ptr<BoundTable> new_table(std::size_t dim, const std::string& rule,
                                      const std::vector<float>& first_slots, bool bfloat16,
                                      std::uint64_t seed, float scale, float norm_max,
                                      std::uint32_t min_count, std::uint64_t ttl,
                                      std::size_t capacity) {
  if (dim < 1 || dim > dim_max) {
    throw py::value_error("dim is " + std::to_string(dim) + "; expected 1 to 1024");
  }
  const Rule* found = find_rule(kernels(), rule);
  if (found == nullptr || names_in(found->slots).size() != first_slots.size()) {
    throw py::value_error("there is no rule '" + rule + "' of " +
                          std::to_string(first_slots.size()) + " slots");
  }
  return std::make_unique<BoundTable>(TableSettings{dim, rule, first_slots, bfloat16, seed, scale,
                                                    norm_max, min_count, ttl, capacity});
}

}  // namespace

void bind_tables(py::module_& module) {
  using py::arg;
  const arg ids("ids"), versions("versions"), version("version");
  const py::arg_v candidates("candidates", false);
  py::class_<BoundTable>(module, "Table")
      .def(py::init(&new_table), arg("dim"), arg("rule"), arg("first_slots"), py::kw_only(),
           arg("bfloat16") = false, arg("seed") = 0, arg("scale") = 0.0f, arg("norm_max") = 0.0f,
           arg("min_count") = 1, arg("ttl") = 0, arg("capacity") = 0)
      .def_property_readonly("numbers", &BoundTable::numbers)
      .def("update", &BoundTable::update, arg("parts"), arg("numbers"), version)
      .def("bytes_with", &BoundTable::bytes_with, arg("ids"), version)
      .def("lookup", &BoundTable::lookup, ids, arg("reply"))
      .def("dump", &BoundTable::dump, arg("after_version"), candidates)
      .def("load", &BoundTable::load, ids, versions, arg("parameters"), arg("slots"), version,
           candidates)
      .def("stats", &BoundTable::stats);
}

}  // namespace pyps
