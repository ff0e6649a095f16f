// Standalone tests of the native code, meant to run under sanitizers: every array is a heap block
// of its exact size, so that one byte read or written beyond it is an error.

#include <cstdio>

void test_kernels();
void test_framing();
void test_codings();
void test_tables();

int main() {
  test_kernels();
  test_framing();
  test_codings();
  test_tables();
  std::puts("native tests passed");
}
