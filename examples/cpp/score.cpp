// Scores candidates by a package of hstu_attn.serving.ScoringStep, without Python:
//
//   score _C.abi3.so step.pt2 steps.pt scores.pt
//
// steps.pt is a list that torch.save has written. It holds the shape of the cache and then, for
// each step, a list of int64 tensors: users, new_tokens and rewritten, as PagedKVCache.step takes
// them, and the package's inputs from seq_offsets on. scores.pt gets a tuple of each step's scores.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "serving/page_table.h"

namespace {

// Loads the operators, as `import hstu_attn` does in Python.
void load_operators(const char* library) {
  if (!dlopen(library, RTLD_NOW | RTLD_GLOBAL)) throw std::runtime_error(dlerror());
}

class Scorer {
 public:
  // A cache of shape [layers, pages, 2, page size, heads, head dim], in the dtype of the rows.
  Scorer(const std::string& package, at::IntArrayRef shape)
      : loader_(package), table_({shape[1], shape[3]}), kv_cache_(at::zeros(shape, at::kFloat)) {}

  at::Tensor score(const at::Tensor& users, const at::Tensor& new_tokens,
                   const at::Tensor& rewritten, at::ArrayRef<at::Tensor> rows) {
    const int64_t batch = users.numel();
    const auto values = [](const at::Tensor& x) { return x.const_data_ptr<int64_t>(); };
    const hstu::StepSize size =
        table_.begin(values(users), values(new_tokens), nullptr, values(rewritten), batch);
    try {
      const auto int32 = [](int64_t length) { return at::empty(length, at::kInt); };
      const at::Tensor page_offsets = int32(batch + 1), page_ids = int32(size.pages);
      const at::Tensor last_page_lens = int32(batch), cached_lens = int32(batch);
      const at::Tensor slots = int32(size.tokens);  // append_paged_kv computes the slots itself
      table_.write_tables(
          size.step,
          {page_offsets.mutable_data_ptr<int32_t>(), page_ids.mutable_data_ptr<int32_t>(),
           last_page_lens.mutable_data_ptr<int32_t>(), cached_lens.mutable_data_ptr<int32_t>(),
           slots.mutable_data_ptr<int32_t>()});
      std::vector<at::Tensor> inputs = kv_cache_.unbind();
      inputs.insert(inputs.end(), {page_offsets, page_ids, last_page_lens, cached_lens});
      inputs.insert(inputs.end(), rows.begin(), rows.end());
      const at::Tensor scores = loader_.run(inputs)[0];
      table_.release(size.step);
      return scores;
    } catch (...) {
      table_.roll_back(size.step);
      throw;
    }
  }

 private:
  torch::inductor::AOTIModelPackageLoader loader_;
  hstu::PageTable table_;
  at::Tensor kv_cache_;
};

c10::IValue load(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(std::string("cannot read ") + path);
  return torch::jit::pickle_load({std::istreambuf_iterator<char>(file), {}});
}

void save(const char* path, const c10::IValue& value) {
  const std::vector<char> bytes = torch::jit::pickle_save(value);
  std::ofstream file(path, std::ios::binary);
  if (!file.write(bytes.data(), bytes.size())) {
    throw std::runtime_error(std::string("cannot write ") + path);
  }
}

void run(const char* library, const char* package, const char* steps_path,
         const char* scores_path) {
  load_operators(library);
  const c10::IValue steps = load(steps_path);
  const at::Tensor shape = steps.toListRef()[0].toTensor();
  Scorer scorer(package, {shape.const_data_ptr<int64_t>(), size_t(shape.numel())});
  std::vector<c10::IValue> scores;
  for (const c10::IValue& step : steps.toListRef().slice(1)) {
    std::vector<at::Tensor> tensors;
    for (const c10::IValue& tensor : step.toListRef()) tensors.push_back(tensor.toTensor());
    scores.push_back(scorer.score(tensors.at(0), tensors.at(1), tensors.at(2),
                                  at::ArrayRef<at::Tensor>(tensors).slice(3)));
  }
  save(scores_path, c10::ivalue::Tuple::create(scores));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: %s _C.abi3.so step.pt2 steps.pt scores.pt\n", argv[0]);
    return 2;
  }
  try {
    run(argv[1], argv[2], argv[3], argv[4]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
