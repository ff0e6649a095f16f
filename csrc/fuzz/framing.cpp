// Messages of the network, split and counted. An input is the number of the payload's field, and
// the message.
#include "framing.h"

#include "input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  const auto number = static_cast<std::uint32_t>(1 + input.below(128));
  const std::vector<std::uint8_t> message = input.rest();
  pyps::Frame frame;
  try {
    pyps::split_frame(message.data(), message.size(), number, &frame);
  } catch (const pyps::FrameError& error) {
    REQUIRE(error.offset() <= message.size());
    return 0;
  }
  REQUIRE(frame.payload.offset <= message.size());
  REQUIRE(frame.payload.size <= message.size() - frame.payload.offset);
  std::vector<std::uint8_t> header;
  std::size_t end = 0;
  for (const pyps::ByteRange& range : frame.header) {
    REQUIRE(range.offset >= end && range.size > 0 && range.size <= message.size() - range.offset);
    end = range.offset + range.size;
    header.insert(header.end(), message.data() + range.offset, message.data() + end);
  }
  // What is not payload is a message without one.
  pyps::Frame again;
  pyps::split_frame(header.data(), header.size(), number, &again);
  REQUIRE(again.payload.offset == header.size() && again.payload.size == 0);
  REQUIRE(header.empty() || (again.header.size() == 1 && again.header[0].size == header.size()));
  std::vector<pyps::CountedField> fields = {
      {1, false}, {number, true, 0, {{1, false}, {2, true, 0, {{3, false}}}}}};
  try {
    // Each takes a byte at least.
    REQUIRE(pyps::count_fields(message.data(), message.size(), &fields) <= message.size());
  } catch (const pyps::FrameError& error) {
    // A payload need not be a message.
    REQUIRE(error.offset() <= message.size());
  }
  return 0;
}
