// What takes long at the start and the end of a run is the work of rank 0, for which the others wait: they
// see its progress, so that no time limit ends them meanwhile.
#include <functional>

#include "cuda/memory.h"
#include "support.h"
#include "tests/unit/temporary_folder.h"
#include "train/gemm_choices.h"
#include "train/weights.h"

namespace minillm::testing {
namespace {

class Progress : public ::testing::Test {
 protected:
  Progress() {
    fill_inputs(trainer, config, world->rank(), 0);
    trainer.enqueue(0);
    (void)trainer.result(0);
  }
  void expect_on_all_ranks(int64_t count) {
    EXPECT_EQ(world->max(count), count);
    EXPECT_EQ(calls, count);
  }

  config::Config config = smallest_config();
  train::Trainer trainer{config, *world};
  int64_t calls = 0;
  std::function<void()> progress = [this] { ++calls; };
};

TEST_F(Progress, OfTimingProductsIsSeenOnAllRanks) {
  const cuda::DeviceMemory scratch(int64_t{64} << 20);
  const cuda::Stream stream;
  train::choose_gemms(trainer.plan().program->blas(), config.gemm, *world,
                      {scratch.data(), static_cast<size_t>(scratch.bytes())}, stream.get(), progress);
  EXPECT_GT(calls, 5);  // shapes of a block's products, forward and backward
  expect_on_all_ranks(calls);
}

TEST_F(Progress, OfSavingIsSeenOnAllRanks) {
  const test::TemporaryFolder folder;  // rank 0's is written
  train::save_weights(trainer, config, *world, folder.path("."), progress);
  expect_on_all_ranks(std::ssize(trainer.layout().units));
}

}  // namespace
}  // namespace minillm::testing

int main(int argc, char** argv) {
  return minillm::testing::run_tests(argc, argv);
}
