// The module pyps._kernels. Only the files named binding* know Python.
//
// A binding checks its arguments, releases the GIL where the kernel takes long, calls it, and does
// nothing else. It never converts or copies what it was given: an array that does not fit is
// refused.

#include "bindings.h"

#include <pybind11/stl.h>

#include <cstring>
#include <string>

#include "binding_arguments.h"
#include "framing.h"
#include "isa.h"
#include "kernels.h"

namespace pyps {
namespace {

// Walking a smaller message costs less than handing over the GIL.
constexpr std::size_t gil_release_size_min = 64 * 1024;

std::uint32_t to_field_number(std::int64_t number) {
  if (number < 1 || number > field_number_max) {
    throw py::value_error("field_number is " + std::to_string(number) + "; expected 1 to " +
                          std::to_string(field_number_max));
  }
  return static_cast<std::uint32_t>(number);
}

// A new bytes object of `size` bytes, which may be written without the GIL while it has no reader.
py::bytes new_bytes(std::size_t size, unsigned char** data) {
  PyObject* object = PyBytes_FromStringAndSize(nullptr, static_cast<py::ssize_t>(size));
  if (object == nullptr) throw py::error_already_set();
  *data = reinterpret_cast<unsigned char*>(PyBytes_AS_STRING(object));
  return py::reinterpret_steal<py::bytes>(object);
}

std::ptrdiff_t first_non_finite(py::handle gradient, int codec_number, std::size_t count) {
  const CodecTraits& codec = to_codec(codec_number);
  const Bytes g(gradient, "gradient");
  g.require_count(codec, count);
  const Kernels& table = kernels();
  const GilReleased without_gil(count);
  return table.first_non_finite(g.data(), codec.codec, count);
}

void decode(py::handle gradient, int codec_number, py::handle out) {
  const CodecTraits& codec = to_codec(codec_number);
  const Bytes g(gradient, "gradient");
  const Floats values(out, "out", Access::write);
  g.require_count(codec, values.count());
  values.require_apart(g);
  const Kernels& table = kernels();
  const GilReleased without_gil(values.count());
  table.decode(values.mutable_data(), g.data(), codec.codec, values.count());
}

py::bytes encode(py::handle values, int codec_number) {
  const CodecTraits& codec = to_codec(codec_number);
  const Floats v(values, "values", Access::read);
  unsigned char* out = nullptr;
  py::bytes encoded = new_bytes(codec.bytes_of(v.count()), &out);
  const Kernels& table = kernels();
  {
    const GilReleased without_gil(v.count());
    table.encode(out, v.data(), codec.codec, v.count());
  }
  return encoded;
}

py::tuple summary(py::handle values) {
  const Floats v(values, "values", Access::read);
  const Kernels& table = kernels();
  Summary result;
  {
    const GilReleased without_gil(v.count());
    result = table.summary(v.data(), v.count());
  }
  return py::make_tuple(result.sum_of_squares, result.min, result.max);
}

py::tuple split_frame_of(py::handle message, std::int64_t field_number) {
  const std::uint32_t number = to_field_number(field_number);
  const Bytes bytes(message, "message");
  Frame frame;
  if (bytes.size() < gil_release_size_min) {
    split_frame(bytes.data(), bytes.size(), number, &frame);
  } else {
    py::gil_scoped_release release;
    split_frame(bytes.data(), bytes.size(), number, &frame);
  }
  std::size_t header_size = 0;
  for (const ByteRange& range : frame.header) header_size += range.size;
  unsigned char* out = nullptr;
  py::bytes header = new_bytes(header_size, &out);
  for (const ByteRange& range : frame.header) {
    std::memcpy(out, bytes.data() + range.offset, range.size);
    out += range.size;
  }
  return py::make_tuple(header, frame.payload.offset, frame.payload.size);
}

std::vector<CountedField> to_counted_fields(const py::dict& tree) {
  std::vector<CountedField> fields;
  for (const auto& [number, inner] : tree) {
    CountedField field = {to_field_number(number.cast<std::int64_t>()), !inner.is_none()};
    if (field.is_message) field.inner = to_counted_fields(inner.cast<py::dict>());
    fields.push_back(std::move(field));
  }
  return fields;
}

void append_counts(const std::vector<CountedField>& fields, py::list* counts) {
  for (const CountedField& field : fields) {
    counts->append(field.count);
    append_counts(field.inner, counts);
  }
}

py::tuple count_fields_of(py::handle message, const py::dict& tree) {
  const Bytes bytes(message, "message");
  std::vector<CountedField> fields = to_counted_fields(tree);
  std::size_t total = 0;
  if (bytes.size() < gil_release_size_min) {
    total = count_fields(bytes.data(), bytes.size(), &fields);
  } else {
    py::gil_scoped_release release;
    total = count_fields(bytes.data(), bytes.size(), &fields);
  }
  py::list counts;
  append_counts(fields, &counts);
  return py::make_tuple(total, counts);
}

// A message with `room` for a header, then tag and length of the payload, then room for `count`
// values of it; and where those begin.
py::tuple new_frame(std::size_t room, std::int64_t field_number, std::size_t count,
                    int codec_number) {
  const CodecTraits& codec = to_codec(codec_number);
  const std::uint32_t number = to_field_number(field_number);
  const std::size_t payload_size = codec.bytes_of(count);
  unsigned char prefix[payload_prefix_size_max];
  const std::size_t prefix_size = write_payload_prefix(number, payload_size, prefix);
  const std::size_t offset = room + prefix_size;
  // Sizes of larger counts could wrap around.
  if (count > INT32_MAX || room > INT32_MAX || offset + payload_size > INT32_MAX) {
    throw py::value_error("count is " + std::to_string(count) + " and room " +
                          std::to_string(room) +
                          "; a message of that many values is beyond protobuf's 2 GiB");
  }
  unsigned char* out = nullptr;
  const py::bytes message = new_bytes(offset + payload_size, &out);
  std::memcpy(out + room, prefix, prefix_size);
  return py::make_tuple(message, offset);
}

bool write_header(const py::bytes& frame, std::size_t room, const py::bytes& header) {
  const Bytes whole(frame, "frame");
  const Bytes head(header, "header");
  if (whole.size() < room) {
    throw py::value_error("frame has " + std::to_string(whole.size()) +
                          " bytes, fewer than its room of " + std::to_string(room));
  }
  auto* out = reinterpret_cast<unsigned char*>(PyBytes_AS_STRING(frame.ptr()));
  if (!pad_header(head.size(), room, out)) return false;
  std::memcpy(out, head.data(), head.size());
  return true;
}

}  // namespace
}  // namespace pyps

PYBIND11_MODULE(_kernels, module) {
  namespace py = pybind11;
  using py::arg;
  module.doc() = "The server's native kernels.";
  py::dict codecs;
  for (const pyps::CodecTraits& codec : pyps::all_codecs()) {
    codecs[codec.name] = static_cast<int>(codec.codec);
  }
  module.attr("CODECS") = codecs;

  // _kernels.pyi says what each does.
  module.def("isa", [] { return std::string(pyps::kernels().isa); });
  module.def("available", &pyps::available_isas);
  module.def("select", &pyps::select_isa, arg("name"));

  pyps::bind_rules(module);
  pyps::bind_tables(module);
  pyps::bind_vectors(module);
  module.def("first_non_finite", &pyps::first_non_finite, arg("gradient"), arg("codec"),
             arg("count"));
  module.def("decode", &pyps::decode, arg("gradient"), arg("codec"), arg("out"));
  module.def("encode", &pyps::encode, arg("values"), arg("codec"));
  module.def("summary", &pyps::summary, arg("values"));

  module.def("split_frame", &pyps::split_frame_of, arg("message"), arg("field_number"));
  module.def("count_fields", &pyps::count_fields_of, arg("message"), arg("tree"));
  module.def("new_frame", &pyps::new_frame, arg("room"), arg("field_number"), arg("count"),
             arg("codec"));
  module.def("write_header", &pyps::write_header, arg("frame"), arg("room"), arg("header"));
}
