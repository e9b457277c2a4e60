"""All errors that a user can meet, by code: what has happened, and what to do.

A message ends with its code (:func:`see`), in C++ too (``csrc/errors/see.h``). ``fastddp explain CODE`` and the page
docs/errors.md show what stands here. A code keeps its meaning: a new error gets a new one at the end, and the code of
an error that is gone (FD019) is not used again.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Explanation(NamedTuple):
    """What is said about a code."""

    title: str
    cause: str
    remedy: str


def see(code: str) -> str:
    """Return the end of an error's text: ``" [FD010: fastddp explain FD010]"``."""
    return f" [{code}: fastddp explain {code}]"


_TEXT = """\
FD001: Ranks hold different models
- Before training, ranks compare names, shapes, dtypes and layouts of all parameters and buffers. They differ. The
  message names the first one that does, and the ranks.
- Build the model from the same configuration on every rank, and do the same to it in the same order before you wrap it.
  Name what is meant to differ in the module's _ddp_params_and_buffers_to_ignore.
FD002: Ranks were given different arguments
- Ranks compare arguments on which their collectives depend, such as a bucket plan. They differ, or one rank could not
  read its file.
- Give DistributedDataParallel the same arguments on all ranks. Save one rank's plan and give that file to all.
FD003: Ranks call models in different orders
- A process has several wrapped models, and ranks are in forwards of different ones. Their gradients would be added up
  with those of another model.
- Let forwards and backwards of models come in the same order on all ranks. Look for a branch that depends on the rank
  or on its data.
FD004: Ranks compress gradients in different ways
- Ranks have registered a hook with different arguments, or only some of them have loaded the hook's saved state. Their
  exchanges would not fit each other.
- Register the same hook with the same arguments on all ranks. Load its checkpoint on all of them or on none, between
  the same two steps.
FD005: Gradients are missing after backward
- The backward ended, and some parameters have no gradient on this rank. The forward did not use their layers, or the
  loss does not depend on them. The message says which ranks have these gradients.
- Pass find_unused_parameters=True, or static_graph=True if all steps are alike. Or use every parameter in the loss, or
  freeze those that are never used before you wrap the model. find_unused_parameters=True is also for a module that is
  replicated in place and trained by one submodule alone, or that steps between two backwards, as a GAN in one module.
FD006: A gradient came again after it was sent
- A parameter got one more gradient after its gradient had been handed to the exchange. Likely causes are two backwards
  over one forward, or a parameter inside several reentrant checkpoints.
- Add up the losses and call backward once, or run all backwards but the last under no_sync(). Use checkpoint(...,
  use_reentrant=False).
FD007: A static graph has changed
- With static_graph=True the first step shows which parameters are used, and nothing may change later. A parameter that
  was not used then got a gradient now.
- Use find_unused_parameters=True instead if the parameters in use differ from step to step.
FD008: A gradient is not where it should be
- A gradient was computed, but is not in parameter.grad, so it cannot be averaged. A hook or an optimizer that steps
  inside backward has taken it, or a context of torch.distributed.autograd keeps it.
- Attach such an optimizer with torch.distributed.optim._apply_optimizer_in_backward before the first forward. Call
  loss.backward() outside of distributed autograd. Wrap each parameter once.
FD009: A gradient is sparse where it was dense, or dense where it was sparse
- Which gradients are sparse is settled when the model is wrapped, from its embeddings' sparse=True. A gradient of the
  other kind has come.
- Build the module with sparse=False. Or exclude its parameters with _set_params_and_buffers_to_ignore_for_model, if
  they are meant to stay on each rank.
FD010: A backward failed, on this rank or on another one
- One rank's backward raised or was not finished, or ranks ran backwards of different models or of different steps: a
  rank has caught the error of a backward that did not reach the model, or has stepped after one that reached no
  parameter. The gradients of that step are void on all ranks, and every rank raises.
- Read the first error: it is on the rank that the message names. Restart from a checkpoint. To go on instead, catch the
  error on all ranks, call zero_grad(), and continue with the next forward.
FD011: A backward begins inside a reentrant checkpoint
- Nothing had told fastddp that this backward had begun, so the end of the checkpoint would pass for its end. The
  forward returned its tensors in an object that fastddp cannot look into, or ran under no_sync(). Or the module is
  replicated in place, and the loss came by a method or a submodule.
- Return tensors in tuples, lists, dicts or dataclasses, and call the module itself. Or use checkpoint(...,
  use_reentrant=False).
FD012: The module changed after it was wrapped
- A parameter was replaced, added, moved, cast or unfrozen after the module was wrapped or replicated; or a replicated
  module is gone or was never called, and its parameters are trained. Their gradients would stay on each rank.
- Make such changes before wrapping, or wrap or replicate the module again. Use load_state_dict() without assign=True,
  which copies values and changes nothing else. Keep a replicated module as long as its parameters are trained.
FD013: Two wrappers average the same parameters
- Two wrappers of this process synchronise the same parameters in one backward. With gradient_as_bucket_view or
  main_grads only one of them can own a gradient. A module that is replicated in place shares no parameters at all.
- Wrap these parameters once, or replicate the whole model once. Or leave out gradient_as_bucket_view, or choose
  main_grads="grad".
FD014: The model was asked at the wrong moment
- Some things can be asked for, or changed, only between backward and the next forward, or between two steps. The call
  came while gradients were travelling, inside a hook, or from another thread during a backward.
- Move the call after backward() and before the next forward. Do not call the model from a communication hook that it
  runs.
FD015: A rank is gone
- A collective failed because a process has ended. The last lines of the message name the rank, as far as this machine
  knows it.
- Look at that rank's output: its error, or the signal that killed it, is the cause. If it was killed, see whether its
  machine had run out of memory. Errors of the other ranks only follow.
FD016: A step stood still
- No gradient moved for longer than the patience of Watch(stall=...). The message says what each rank waits for, and
  which rank is the cause.
- docs/watch.md says what to do about each cause. Watch(stall="report") reports and waits. A greater patience allows for
  longer pauses, a greater idle_patience for longer code of one rank's own.
FD017: Gradients are not finite
- A gradient is infinite or NaN, or too large to be squared. The message names the rank and the parameter where that is
  known.
- Look at that rank's input of this step first. Lower the learning rate or the loss scale, or use bfloat16. Under a
  gradient scaler a few such steps are normal.
FD018: Replicas differ
- An audit found that a parameter, a buffer or optimizer state has not the same bits on all ranks. Training has run
  apart, or a machine computes wrongly.
- Load the last checkpoint from before the step in the message. If one rank alone differs, again and again, examine its
  machine with fastddp doctor. Otherwise look for code that depends on the rank.
FD020: The extension does not fit this torch
- The C++ part of fastddp is compiled for one minor version of torch and one Python. A wheel has it for some releases.
  For another torch the first import compiles it, and that was not possible here: the message says what is missing, or
  what the compiler said.
- Run python -m fastddp build where there are a C++ compiler and a home that can be written: jobs with the same torch
  and home find the result. Or install a torch that the wheel is for. XDG_CACHE_HOME names another folder.
FD021: The process group is missing, or is not usable
- No process group was initialised, it has been destroyed, or a group that is written in Python counts ranks in another
  way than its C++ part.
- Start the script with torchrun, and call torch.distributed.init_process_group() before you wrap. Wrap again after the
  group was made anew.
FD022: The module cannot be wrapped as it is
- It has no parameter to train, or one without values or without a shape; its parameters are on several kinds of
  devices, or do not fit device_ids; or it is of a kind that cannot be synchronised, or a class that allows no subclass.
- Do to the module what the message says, then wrap it. Parameters that stay on each rank can be excluded with
  _set_params_and_buffers_to_ignore_for_model.
FD023: Arguments do not go together
- Two arguments decide the same thing, or one of them takes an exchange that the other replaces, as a communication hook
  does.
- Leave out one of the two. Each argument's paragraph in docs/api.md says what it goes with.
FD024: An argument has a wrong type or value
- The message says what the argument takes and what it got.
- Pass what the message asks for. docs/api.md explains every argument.
FD025: A bucket plan does not fit the module
- The plan of buckets=... names parameters that the module does not have, or has in another shape, dtype or place. It
  was probably saved for another version of the model.
- Leave buckets out, train a step, and save model.bucket_plan() anew.
FD026: A file holds something else than a plan or a profile
- The file is not of fastddp's format, was cut short, or was written by a version of fastddp with another format.
- Write it anew with this version: model.bucket_plan().save(path).
FD027: What is asked for was not switched on
- Audits and blame for gradients cost something, so they are there only where they were asked for.
- Switch it on when you wrap the module: watch=fastddp.Watch(audit_every=...) or Watch(corruption=...).
FD028: The hierarchy does not fit
- Nodes have different numbers of ranks, the mesh has other ranks than the process group, or the exchange in use cannot
  be split in two levels.
- Start as many processes on each node, and give a mesh of exactly the ranks of the process group. Or leave hierarchy
  out.
FD029: Memory for wires is not available
- wire_memory takes memory of NCCL that this torch, this NCCL or these GPUs do not have, or another argument needs its
  wires elsewhere.
- Leave wire_memory out: everything works the same in ordinary memory. docs/gpu.md says what it takes.
FD030: main_grads cannot be used like this
- main_grads keeps fp32 gradients of parameters of 16 bits. The parameters, the optimizer or another argument do not
  allow that, or gradients of another dtype are still there.
- Follow the message: wrap a module of 16 bits without mixed_precision, call zero_grad() before you wrap it, and use an
  optimizer that takes gradients of another dtype.
FD031: Weights of gradient_average cannot be used
- The weights do not add up to a positive, finite number over all ranks, one is no number, or the exchange in use has no
  such average.
- Let every rank give a number of at least 0, and one of them more than 0. Or leave gradient_average at "mean".
FD032: mixed_precision is not usable as given
- Its dtypes are no floating-point dtypes, or gradients cannot be added up in one of them, or it is of another class
  than torch's.
- Give torch.nn.parallel.distributed._MixedPrecision with dtypes of floating-point numbers.
FD033: A device mesh or a DTensor does not fit
- The mesh has more than one dimension, a process group was given too, or a parameter is sharded over ranks over which
  its gradients would be averaged as well. Or a replicated module with DTensors was trained by another method than
  forward.
- Pass a slice of one dimension, as device_mesh=mesh["dp"], and shard parameters over another dimension. Call the module
  itself.
FD034: A communication hook is not usable
- The hook has another signature, is registered a second time or is called by hand, or its future holds no tensor that
  is laid out like the bucket.
- Return a future that holds one tensor like bucket.buffer(); take it out of what a collective returns with .then().
  Register one hook for each wrapper.
FD035: The state of a hook is of another kind or another model
- The hook was registered with a state that it does not know, or with one that belongs to another model.
- Make a new state, of the class that the message names, for each model.
FD036: The saved state of a hook cannot be loaded
- It is of another format, another model or other arguments, or a part is missing or damaged. Nothing has been changed.
- Make the hook's state with the same arguments and for the same model as when it was saved. Or begin without the saved
  state.
FD037: These gradients cannot be compressed like this
- The gradients are complex where a hook takes real ones, or a hook that compresses already is inside of a wrapper that
  casts.
- Choose another hook, or register the hook without the wrapper.
FD038: Only torch's DDP can do that
- The call serves the reducer of torch's DDP, or a mode of it that fastddp does not have: torch.distributed.autograd,
  compiled autograd, or a backward that is finished by hand.
- Leave the call out, or use torch.nn.parallel.DistributedDataParallel. docs/differences.md lists all of these.
FD039: The wrapper cannot be pickled or loaded
- A wrapper can be pickled only over the default process group. A pickle of torch's wrapper cannot become one of
  fastddp's.
- Save state_dict() or model.module instead. Load an old pickle where nothing is patched.
FD040: The driver or Triton does not fit
- The driver of the GPU is missing or older than CUDA 12, or a kernel was compiled by a version of Triton that fastddp
  does not know.
- Update the driver. Empty Triton's cache (~/.triton/cache) and install a version that fastddp supports; fastddp doctor
  names what does not fit.
FD041: A sharded gradient was used as a whole one
- With a ShardedOptimizer each rank has a part of each averaged gradient, in the optimizer. parameter.grad says so, and
  has no values. Gradients that came under no_sync(), or that were assigned, are not averages.
- Use fastddp.clip_grad_norm_, model.last_grad_norm() or model.found_inf(). Change a gradient before it is averaged, by
  parameter.register_hook. Run the last backward of a step outside of no_sync().
FD042: The optimizer cannot be sharded like this
- A ShardedOptimizer trains all dense parameters of its model, over the model's ranks. Its gradients travel as they are,
  as fp16, bf16 or 8 bits. Some optimizers need whole parameters.
- Give it all parameters that the model trains, one of those hooks, and shard="parameters" for an optimizer that does
  not treat each element by itself.
FD043: The saved state of a sharded optimizer does not fit
- Each rank of a ShardedOptimizer saves its part of the state in state_dict(). The state that was given is of another
  model, of another rank or of another number of ranks; or a part was used as a whole.
- Take full_state_dict(), which any number of ranks and an optimizer that is not sharded can load; or save and load by
  torch.distributed.checkpoint with its get_state_dict and set_state_dict.
FD044: Parameters are incomplete
- After a step of a ShardedOptimizer this rank did not get all parameters that others have stepped: one of them has
  ended, or the network failed. So it holds new parameters beside old ones.
- Start again from the last checkpoint, or load it into the model and the optimizer.
FD045: The device has failed
- Something that ran on the device has failed, such as a kernel that accessed memory which is not its own. CUDA says so
  late, in any later call. Nothing runs on the device any more for this process.
- Restart the process from a checkpoint, and do not use this step's gradients. To find what failed, run it with
  CUDA_LAUNCH_BLOCKING=1 or under compute-sanitizer. Look for Xid messages in the kernel's log, too.
FD046: The optimizer needs whole parameters, or all of them
- What is not one of torch's elementwise classes has been tried on small parameters. It made other steps with a part of
  a parameter, or with some of the parameters, than with all; or it takes a closure, or calls collectives itself. Or its
  state turned out to have no number for each element.
- Leave shard out: then ranks have whole parameters where that is enough. Where the message says "over all", use the
  optimizer without ShardedOptimizer.
FD047: A sharded optimizer is not alone, or lacks a method
- Another wrapper synchronises the same parameters, another ShardedOptimizer trains some of them, or a method of the
  optimizer's class was called that would act on one rank's part.
- Wrap a module once, and make one ShardedOptimizer for it, whose groups name their classes. For a method, use step,
  zero_grad, train, eval and the parameter groups.
FD048: A step with gradients of one rank
- An optimizer steps parameters whose gradients stayed on this rank: the loss did not go through the wrapper, or no
  backward outside of no_sync() came before the step. Each rank steps with another gradient.
- Run the forward and the backward of a step's last microbatch through the wrapper and outside of no_sync(), or
  replicate the module in place (fastddp.replicate). For local SGD, put no_sync() around the step as well.
  Watch(local_steps=...) says what happens.
FD049: A layer writes gradients where they are not averaged
- Layers with fused accumulation (Megatron's, Transformer Engine's) add to parameter.main_grad and set
  grad_added_to_main_grad. Without main_grads="main_grad" that stays on each rank. Or a layer has added to a gradient
  that holds a sum over ranks, which would count several times.
- Wrap the module with main_grads="main_grad", or build the layer without fused accumulation. With
  gradient_average="sum", call model.zero_grad() after each step.
FD050: An optimizer steps inside the backward of a compiled graph
- Gradients of a compiled graph travel while its backward runs. A communication hook, or another thread, has let an
  optimizer step then. The graph may still read the parameters, and would compute with those of the next step.
- Step after backward. Or set torch._dynamo.config.optimize_ddp = False before the model is compiled, so that all
  gradients of a graph come when it ends; or do not compile.
FD051: Gradients of a compiled graph come when it ends
- Usually fastddp compiles one graph, and gradients travel while its backward runs. Here they do not. The message says
  why: other tensors stand in the parameters' places, a step inside backward, CUDA graphs (mode="reduce-overhead" and
  "max-autotune"), or code that was compiled outside of the wrapper's forward. Gradients are right, but less overlaps.
- Wrap the module before its first forward. Leave torch._dynamo.config.optimize_ddp at True, and use mode="default" or
  "max-autotune-no-cudagraphs". Or leave it as it is: only time is lost.
FD052: A model has no ranks
- The connection to another rank was lost and a manager was told (on_lost()), abort() was called, or regroup() has
  raised. The model has left its old ranks, and has no others.
- Call regroup() with a process group of the ranks that are left, and that hold the same model with the same options;
  then zero_grad(), and go on.
FD053: A sharded optimizer has lost its state
- The model was given other ranks. Each rank had a part of the state, and parts of ranks that are gone are nowhere.
- Load a checkpoint: the model's, and load_state_dict() of the optimizer on all ranks. Before a planned change,
  gather_state() gives the whole state to whoever keeps it.
FD054: The manager's quorum is not of this kind
- fastddp.elastic averages over all replicas of a quorum, and all of them have the others' parameters before their
  first forward. An asynchronous quorum, or one with spares, is another agreement. Or the lighthouse has no address.
- Make the torchft.Manager with use_async_quorum=False and WorldSizeMode.DYNAMIC, and leave out what says which ranks
  there are: process_group, device_mesh and hierarchy. Give the lighthouse as http://host:port.
"""


def _explanations() -> dict[str, Explanation]:
    """Those of the text. Each is a line with code and title, and two items: what has happened, and what to do."""
    found = {}
    for entry in re.split(r"\n(?=FD)", _TEXT.strip()):
        head, cause, remedy = (" ".join(part.split()) for part in entry.split("\n- "))
        code, title = head.split(": ", 1)
        found[code] = Explanation(title, cause, remedy)
    return found


ERRORS = _explanations()
