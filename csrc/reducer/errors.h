// Errors for users about wrong gradients. Each says what is wrong, where, the likely causes, and the remedy.
#pragma once

namespace fastddp {

// Each follows "fastddp: parameter NAME (number N, bucket B)".

constexpr auto kGradientIsGone =
    " got a gradient that is not in parameter.grad, so it cannot be averaged. Likely causes: the backward ran inside a "
    "context of torch.distributed.autograd, which keeps gradients to itself: call loss.backward() outside of it. Or a hook "
    "took the gradient away: attach an optimizer that steps inside backward with "
    "torch.distributed.optim._apply_optimizer_in_backward, before the first forward.";

constexpr auto kMainGradientIsGone =
    " got a gradient that is not in parameter.grad, from where main_grads=\"main_grad\" takes it. Likely causes: another "
    "DistributedDataParallel with that option has the same parameter and has taken it; or a hook has, or a context of "
    "torch.distributed.autograd. Wrap parameters once, or with main_grads=\"grad\".";

constexpr auto kWrittenIntoSum =
    " has a gradient that a layer may have added to itself, and that holds a sum over ranks (gradient_average=\"sum\"), which "
    "would count once for each rank. Call model.zero_grad() after each step.";

// In torch's words: people and frameworks search logs for them.
constexpr auto kUsageChanged =
    " got a gradient on this rank, but none in the first step. Your training graph has changed in this iteration, and "
    "static_graph (or skip_all_reduce_unused_params) lets nothing change. Use find_unused_parameters=True instead if the "
    "parameters in use differ from step to step.";

// Follows the rank on which it happened.
constexpr auto kSecondGradient =
    ", after the first was handed to the exchange. Expected to mark a variable ready only once. Likely causes: two backward "
    "passes over one forward, or a parameter used inside several reentrant checkpoints. Add up the losses and call backward "
    "once, run all but the last backward under no_sync(), or use checkpoint(..., use_reentrant=False).";

constexpr auto kGradientAfterItsWindow =
    " got a gradient after the gradients of its window were synchronised. It had one from a backward under no_sync and none "
    "from the backward that synchronised, which therefore counted as the last one. Run all but the last backward of a "
    "window under no_sync().";

constexpr auto kSparseIsDense =
    " got a dense gradient, but its module has sparse=True: is it used outside of that module, too? Build the module with "
    "sparse=False.";

// These stand alone.

constexpr auto kBeginsInCheckpoint =
    "fastddp: the first gradient of a backward came inside a reentrant checkpoint, and nothing had told before that this "
    "backward had begun. The checkpoint's end would be taken for its end, at which gradients are averaged where not all have to "
    "come (with find_unused_parameters=True, in the first step of a static graph, and after gradients of no_sync()). Likely "
    "causes: the forward returned its tensors inside an object that is no tuple, list, dict or dataclass; it ran under "
    "no_sync(), after a forward outside of it whose backward never came; or the module is replicated in place, and the loss came "
    "by another method than its own forward. Return tensors in such containers, call the module itself, or use "
    "checkpoint(..., use_reentrant=False).";

constexpr auto kLeft = "fastddp: another thread has given this model other ranks (regroup()), so this backward is void.";

constexpr auto kStepsInCompiledBackward =
    "fastddp: an optimizer of this model steps inside the backward of a compiled graph, which may still read the parameters. Step "
    "after backward, or compile with torch._dynamo.config.optimize_ddp = False: then all gradients of a graph come when it ends.";

constexpr auto kViewsInTwoWires =
    "fastddp: another DistributedDataParallel of this process averages gradients of the same parameters in this backward, "
    "and with gradient_as_bucket_view=True a gradient lives in the buckets of one of them only. Wrap without "
    "gradient_as_bucket_view, or wrap these parameters once.";

constexpr auto kMainGradientsOfTwo =
    "fastddp: another DistributedDataParallel of this process averages gradients of the same parameters in this backward, and "
    "with main_grads=\"main_grad\" the first one takes them out of parameter.grad. Wrap with main_grads=\"grad\", "
    "or wrap these parameters once.";

}  // namespace fastddp
