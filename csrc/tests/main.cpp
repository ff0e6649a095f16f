// Standalone tests of the native code, meant to run under sanitizers: every array is a heap block
// of its exact size, so that one byte read or written beyond it is an error.

#include <cstdio>

void test_kernels();
void test_rules();
void test_vectors();
void test_framing();
void test_blocks();
void test_sparse();

int main() {
  test_kernels();
  test_rules();
  test_vectors();
  test_framing();
  test_blocks();
  test_sparse();
  std::puts("native tests passed");
}
