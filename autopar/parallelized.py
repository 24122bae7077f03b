"""The step that :func:`autopar.parallelize` returns: what is traced, planned and compiled, for which arguments?

Each is made at the first call with new shapes (or by ``plan``, ``compile``, ``init``) and kept: plans by the program, the cluster
and what was demanded, executables by the arguments.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import tree_util

from autopar._compat import shape_of
from autopar.agreed_plans import agreed_plan
from autopar.asked import demands_of_user, said_of_inputs
from autopar.calls import check_fits, check_initialiser, check_leaves, key_of
from autopar.cluster import Cluster
from autopar.collector import paused_collector
from autopar.compiled import Compiled, stages_here
from autopar.compilers import Compiler, Target, target_of
from autopar.errors import PlanError, TraceError
from autopar.first_state import Initialiser, born_sharded, initialiser_for
from autopar.graph.roles import Role, infer_roles
from autopar.graph.tracing import Call, flatten_call, retracer, trace
from autopar.graph.wishes import LeafWish, LeafWishes, leaf_wishes, names_on
from autopar.homes import devices_here, homes_of, pieced_home
from autopar.inter_op.account import PipelineAccount, account_of
from autopar.inter_op.assemble import Assembled, stages_of_leaves
from autopar.intra_op.task import Found
from autopar.intra_op.why import Question, Why, why
from autopar.kept_plans import kept_plan
from autopar.likeness import Likeness, types_of
from autopar.methods import HAND_MADE, Method, method_of
from autopar.on_ray import pipeline_on_ray, step_on_ray
from autopar.options import Options, checked_cluster, read_options
from autopar.pipelines import assembled
from autopar.plan import Plan, Schedule
from autopar.planning import make_plan
from autopar.progress import Progress
from autopar.runtime.executor import Executor
from autopar.runtime.pieced_array import PiecedArray
from autopar.runtime.xla_options import Foretold
from autopar.schedule.spmd import lower
from autopar.stage_tasks import loop_of
from autopar.subjects import Demands, Subjected, as_planned, subject_of
from autopar.transfer import adapt_stage
from autopar.user_shardings import UserShardings

WHY_SECONDS = 8.0
"""So long the explanation may look for runner-ups."""


class Parallelized:
    """A function of pytrees that runs in parallel by a plan.  Made by :func:`autopar.parallelize`."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        functools.update_wrapper(self, function)
        self._name = getattr(function, "__name__", type(function).__name__)
        self._function = function
        self._options = options
        self._subjects: dict[Hashable, Subjected] = {}
        self._compiled: dict[Hashable, Compiled] = {}
        self._quick: dict[Hashable, Compiled] = {}
        self._planned: dict[tuple[str, Cluster, Hashable], tuple[Subjected, Plan, Found | None]] = {}
        self._placed: dict[str, LeafWish | None] = {}  # by leaf path, as first seen: what our steps return is ours
        self._in_use: Plan | None = None
        self._pipeline: tuple[Plan, Cluster, Assembled] | None = None
        self._last: Compiled | None = None
        self._taken: dict[Hashable, Plan] = {}  # plans that were read from disk or told by process 0
        self._likeness: Likeness | None = None  # of the plan that ran last, or that the state was born for

    # ------------------------------------------------------------------------------------------------------- calling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step; the first call with new shapes traces, plans and compiles.

        Under ``jax.disable_jit()`` the function itself runs, in Python, as that of ``jax.jit`` does.
        """
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return self._function(*args, **kwargs)
        leaves, quick_key = self._quickly(args, kwargs)
        if (compiled := self._quick.get(quick_key)) is None:
            call = self._flatten(args, kwargs)
            self._refuse_tracers(call)
            leaves, key = list(call.leaves), (key_of(call), self._names_on(call), self._like_key)
            if (compiled := self._compiled.get(key)) is None:
                compiled = self._compiled[key] = self._compile(args, kwargs, self.cluster, None)
            if quick_key is not None:
                self._quick[quick_key] = compiled
        self._last = compiled
        return compiled.run(leaves)

    def _quickly(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], Hashable]:
        """Leaves and a key that costs no paths; None as the key where only the careful way will do.

        Equal treedefs, shapes and dtypes imply equal paths, so a hit is right; a miss (a state that was built anew has
        an unequal treedef) only means that the careful key decides.
        """
        if self._options.static_argnums or self._options.static_argnames:
            return [], None
        leaves, tree = tree_util.tree_flatten((args, kwargs))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return [], None
        try:
            key = (tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves), self._like_key)
            hash(key)
        except (AttributeError, TypeError):
            return [], None
        return leaves, key

    def plan(
        self, *args: Any, cluster: Cluster | None = None, method: str | Method | None = None, **kwargs: Any
    ) -> Plan:
        """The plan for these arguments (``jax.ShapeDtypeStruct`` leaves suffice); nothing is compiled."""
        return self._plan(args, kwargs, checked_cluster(cluster) or self.cluster, self._demands(method))[1]

    def compile(
        self,
        *args: Any,
        cluster: Cluster | None = None,
        method: str | Method | None = None,
        compiler: str | Compiler | None = None,
        **kwargs: Any,
    ) -> Compiled:
        """The compiled step for these arguments (shapes suffice) on the devices of this process.

        With ``compiler`` (see :class:`~autopar.compilers.Compiler`) it is compiled for GPUs that need not be here: its
        text and its memory can be read, and it cannot run.
        """
        cluster = checked_cluster(cluster) or self.cluster
        target = None if compiler is None else target_of(Compiler.of(compiler), cluster)
        return self._compile(args, kwargs, cluster, method, target)

    def use(self, plan: Plan) -> None:
        """Run by this plan from now on; it is held against the function at the next call."""
        if not isinstance(plan, Plan):
            raise PlanError(f"use() takes a Plan, not {plan!r}; read a file with autopar.Plan.load(path)")
        if plan.jax_version != jax.__version__:
            raise PlanError(
                f"the plan was made with jax {plan.jax_version} and this is jax {jax.__version__}, whose "
                "programs differ; plan again with this version"
            )
        self._in_use = plan
        self._compiled.clear()
        self._quick.clear()

    def move_to(self, cluster: Cluster) -> None:
        """Plan for, and run on, another cluster from now on; a plan that was given to :meth:`use` is given up.

        State that lies on the old one is not brought along: checkpoints are (:class:`autopar.Checkpoints`).
        """
        self._options = read_options({"cluster": cluster}, self._options)
        self._in_use = self._pipeline = self._last = self._likeness = None
        self._compiled.clear()
        self._quick.clear()

    def init(self, init_fn: Callable[[], Any], *rest: Any, **kwargs: Any) -> Any:
        """The first state, born in the plan's layouts: no device ever holds the whole of it.

        ``init_fn`` takes no arguments and is traced once; ``rest`` are the step's other arguments (shapes suffice).
        """
        first, shapes, plan, stage_of = self._first_state(init_fn, rest, kwargs)
        with self._progress() as progress:
            progress.say("compiling the initialiser")
            born = born_sharded(first.program, plan, self.cluster, stage_of)
        return first.together(
            born, lambda arrays, pieces, _: PiecedArray(arrays, pieces.dim), tree_util.tree_leaves(shapes)
        )

    def homes(self, init_fn: Callable[[], Any], *rest: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The shapes of the first state, and where the plan wants its leaves: what orbax is told to restore one.

        Arguments as for :meth:`init`; nothing is run.
        """
        first, shapes, plan, stage_of = self._first_state(init_fn, rest, kwargs)
        homes = homes_of(first.program.out_avals, plan, self.cluster, stage_of)
        return shapes, first.together(homes, pieced_home, tree_util.tree_leaves(shapes))

    def _first_state(
        self, init_fn: Callable[[], Any], rest: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Initialiser, Any, Plan, dict[int, int]]:
        """The initialiser, the shapes of what it returns, the plan, and the stages of its leaves."""
        check_initialiser(init_fn)
        traced = trace(init_fn, (), {})
        # Weak types too: the state is to be what init_fn gives, and jax.eval_shape says of it.
        leaves = [shape_of(aval) for aval in traced.out_avals]
        shapes = tree_util.tree_unflatten(traced.out_tree, leaves)
        subject, plan = self._planned_or_in_use((shapes, *rest), kwargs, self.cluster, None)
        if len(leaves) > subject.program.in_tree.num_leaves:
            raise TraceError(
                "init_fn returns more leaves than the step takes arguments; pass the step's other arguments"
            )
        first = initialiser_for(traced, subject, self.cluster.device.platform.value)
        return first, shapes, plan, self._note_likeness(subject, plan, self.cluster)

    def with_options(self, **options: Any) -> Parallelized:
        """The same function with some options of :func:`autopar.parallelize` changed; it plans and compiles for itself."""
        return Parallelized(self._function, read_options(options, self._options))

    # ----------------------------------------------------------------------------------------------------- inspecting

    @property
    def cluster(self) -> Cluster:
        """The cluster that is planned for unless a call says otherwise."""
        like = self._options.like
        return self._options.cluster or (Cluster.local() if like is None else like.cluster)

    @property
    def last(self) -> Compiled | None:
        """What the last call ran."""
        return self._last

    def likeness(self) -> Likeness:
        """Where the state lies by the plan that ran last, or that :meth:`init` used; raises PlanError while there is none."""
        if self._likeness is None:
            raise PlanError(
                f"{self._name}, which like= names, has no plan yet; call its init, or run a step of it, first"
            )
        return self._likeness

    def records(
        self, *args: Any, cluster: Cluster | None = None, method: str | Method | None = None, **kwargs: Any
    ) -> tuple[Subjected, Plan, Found | None]:
        """Subject, plan and the planner's own records, for the explanation."""
        return self._plan(args, kwargs, checked_cluster(cluster) or self.cluster, self._demands(method))

    def records_of(
        self, subject: Subjected, *, cluster: Cluster, method: str | Method | None = None, within_budget: bool = True
    ) -> tuple[Subjected, Plan, Found | None]:
        """Subject, plan and planner's records for a step that was traced before, if need be without the memory budget.

        A mesh shape, stages, and shardings in the code are not demanded of another method, nor the microbatches of a
        pipeline of one that has no stages.
        """
        demands = self._demands(method)
        if method is not None:
            count = demands.num_microbatches if demands.stages is None else None
            alone: dict[str, Any] = {"stages": None, "schedule": None, "stages_per_mesh": None, "mesh_shape": None}
            demands = replace(demands, user_shardings=UserShardings.IGNORE, num_microbatches=count, **alone)
        if not within_budget:
            demands = replace(demands, memory_per_device=math.inf)
        with self._progress() as progress, paused_collector():
            return self._plan_subject(subject, cluster, demands, progress)

    def last_records(self) -> tuple[Subjected, Plan, Found | None] | None:
        """What the last call ran: subject, plan, and the planner's records unless the plan came from elsewhere."""
        if self._last is None:
            return None
        plan = self._last.plan
        found = next((found for _, known, found in self._planned.values() if known is plan), None)
        return self._last.subject, plan, found

    def account(self, subject: Subjected, plan: Plan, cluster: Cluster) -> PipelineAccount:
        """The pipeline of a plan, priced and simulated; ``subject`` runs in the plan's microbatches."""
        return account_of(self._assembled(subject, plan, cluster), loop_of(subject), plan.cuts, cluster)

    def runner_ups(
        self, subject: Subjected, found: Found, cluster: Cluster, groups: Sequence[Sequence[int]]
    ) -> tuple[Why, ...]:
        """What the best plan would cost in which a group of inputs (by position) lies otherwise.

        See :mod:`autopar.intra_op.why`; values in the answer are those of ``found.program.graph``.
        """
        inputs = found.program.graph.inputs
        groups = [[inputs[position] for position in group] for group in groups]
        question = Question(found, subject.roles.state_pairs, cluster)
        return why(question, groups, time_limit_seconds=WHY_SECONDS)

    def said_by_user(
        self, subject: Subjected, cluster: Cluster, method: str | Method | None
    ) -> tuple[dict[int, str], tuple[str, ...]]:
        """Input positions of which the user has demanded a layout, with where; and notes on what was not kept."""
        demands = self._demands(method)
        user = demands_of_user(subject, cluster, demands)
        return said_of_inputs(subject, user, demands), user.notes

    @property
    def opponents(self) -> tuple[str, ...]:
        """Names of the hand-made methods that an explanation compares with."""
        return tuple(method.name for method in HAND_MADE)

    @property
    def demands(self) -> Demands:
        """What the user asked of every plan."""
        return self._options.demands

    # -------------------------------------------------------------------------------------------------------- planning

    def _demands(self, method: str | Method | None) -> Demands:
        if method is None:
            like = self._options.like
            return self._options.demands if like is None else replace(self._options.demands, like=like.likeness())
        method_of(method)  # refuses what is none
        return replace(self._options.demands, method=method)

    @property
    def _like_key(self) -> Hashable:
        like = self._options.like
        return None if like is None else like.likeness().key

    def _progress(self) -> Progress:
        return Progress(self._name)

    def _flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        options = self._options
        return flatten_call(
            self._function, args, kwargs, static_argnums=options.static_argnums, static_argnames=options.static_argnames
        )

    def _refuse_tracers(self, call: Call) -> None:
        traced = next(
            (path for leaf, path in zip(call.leaves, call.paths, strict=True) if isinstance(leaf, jax.core.Tracer)),
            None,
        )
        if traced is not None:
            raise TraceError(
                f"{self._name} is a whole program over a cluster and cannot run inside jit, grad or vmap "
                f"({traced} is a tracer). Apply the transformation inside the function that you give to autopar.parallelize."
            )

    def _subject(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], platform: str) -> Subjected:
        call = self._flatten(args, kwargs)
        key = (key_of(call), self._names_on(call), platform, self._like_key)
        if key not in self._subjects:
            options = self._options
            static: dict[str, Any] = {
                "static_argnums": options.static_argnums,
                "static_argnames": options.static_argnames,
            }
            program = trace(self._function, args, kwargs, **static)
            batch = options.batch_argnums
            if batch is None and options.like is not None:
                batch = options.like.likeness().batch_arguments(program.in_keys, types_of(program))
            roles = infer_roles(program, batch_argnums=batch, state_argnums=options.state_argnums)
            retrace = retracer(self._function, call, program, roles.leaves(Role.BATCH), **static)
            self._subjects[key] = subject_of(program, roles, platform, self._leaf_wishes(call), retrace)
        return self._subjects[key]

    def _names_on(self, call: Call) -> Hashable:
        """What boxes and metadata say of the leaves, which is no part of their paths and shapes."""
        if self._options.demands.user_shardings is UserShardings.IGNORE:
            return ()
        return tuple(names_on(call)[0].items())

    def _leaf_wishes(self, call: Call) -> LeafWishes | None:
        """Shardings that the arguments carry; where arrays lie counts as it was when a leaf was first seen."""
        if self._options.demands.user_shardings is UserShardings.IGNORE:
            return None
        said = leaf_wishes(call)
        if self._options.like is not None:
            return replace(said, placed={})  # the other step says where arrays lie
        for path in call.paths:
            self._placed.setdefault(path, said.placed.get(path))
        placed = {path: wish for path in call.paths if (wish := self._placed[path]) is not None}
        return replace(said, placed=placed)

    def _plan(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], cluster: Cluster, demands: Demands
    ) -> tuple[Subjected, Plan, Found | None]:
        with self._progress() as progress, paused_collector():
            progress.say("tracing")
            subject = self._subject(args, kwargs, cluster.device.platform.value)
            return self._plan_subject(subject, cluster, demands, progress)

    def _plan_subject(
        self, subject: Subjected, cluster: Cluster, demands: Demands, progress: Progress
    ) -> tuple[Subjected, Plan, Found | None]:
        """The subject that comes back runs in as many microbatches as the plan says."""
        key = (subject.fingerprint, cluster, (demands.key, subject.wishes))
        if key not in self._planned:
            progress.say("planning")
            self._planned[key] = self._reused(subject, cluster, demands) or make_plan(
                subject, cluster, demands, progress.say
            )
        return self._planned[key]

    def _reused(
        self, subject: Subjected, cluster: Cluster, demands: Demands
    ) -> tuple[Subjected, Plan, Found | None] | None:
        """An earlier plan of the same program with another batch, if its layouts still divide."""
        asked = (demands.key, subject.wishes)
        for (_, known_cluster, known_asked), (planned_for, plan, found) in self._planned.items():
            if known_cluster == cluster and known_asked == asked:
                adapted = adapt_stage(plan, planned_for, subject, cluster, demands)
                if adapted is not None:
                    return subject, adapted, found
        return None

    def _compile(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        cluster: Cluster,
        method: str | Method | None,
        target: Target | None = None,
    ) -> Compiled:
        subject, plan = self._planned_or_in_use(args, kwargs, cluster, method)
        if target is None:
            self._note_likeness(subject, plan, cluster)
        if plan.is_pipeline and target is not None:
            raise PlanError("a pipeline is compiled for the devices of this process only; leave compiler= out")
        donated = subject.donated if self._options.demands.donate_state else frozenset()
        with self._progress() as progress:
            if plan.is_pipeline:
                progress.say("putting the pipeline together")
                whole = self._assembled(subject, plan, cluster)
                if cluster.runs_on is not None:
                    remote = pipeline_on_ray(whole, subject, cluster, progress.say)
                    return Compiled(subject, plan, whole.pipeline, remote)
                return Compiled(subject, plan, whole.pipeline, stages_here(whole, subject, cluster, progress.say))
            progress.say(f"compiling for mesh {plan.mesh}")
            program = lower(subject.graph, plan.stages[0], plan.out_layouts, subject.hosted_ends)
            if cluster.runs_on is not None and target is None:
                numbers = plan.devices_of(0)
                remote = step_on_ray(program, subject.program, donated, cluster, progress.say, numbers)
                return Compiled(subject, plan, program, remote)
            target = target or Target(devices_here(cluster, plan.devices_of(0)))
            foretold = Foretold(plan.prediction.memory.total_bytes, cluster.device.memory_bytes)
            executor = Executor(program, subject.program.in_avals, donated, target.devices, target.options, foretold)
        return Compiled(subject, plan, program, executor)

    def _planned_or_in_use(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], cluster: Cluster, method: str | Method | None
    ) -> tuple[Subjected, Plan]:
        """What runs for these arguments: the plan that was given to :meth:`use`, or one that is made for them."""
        platform = cluster.device.platform.value
        subject, plan = self._subject(args, kwargs, platform), self._in_use
        if plan is None or method is not None:
            demands = self._demands(method)
            if cluster.runs_on is None and not cluster.is_distributed:
                found, plan, _ = self._plan(args, kwargs, cluster, demands)
                return found, plan
            key = subject.fingerprint, cluster, (demands.key, subject.wishes)
            if key not in self._taken:
                self._taken[key] = self._told_or_kept(subject, args, kwargs, cluster, demands)
            plan = self._taken[key]
        terms = replace(self._options.demands.terms(plan.num_microbatches), shares=plan.shares)
        check_fits(plan, subject, terms, cluster)
        rewritten = as_planned(subject, plan, terms, platform)
        if plan.is_pipeline:
            check_leaves(plan, rewritten)
        return rewritten, plan

    def _told_or_kept(
        self, subject: Subjected, args: tuple[Any, ...], kwargs: Mapping[str, Any], cluster: Cluster, demands: Demands
    ) -> Plan:
        """The plan of a cluster of several processes: of all the same one, and the same in a second start of the job."""
        if cluster.is_distributed:
            return agreed_plan(lambda: self._plan(args, kwargs, cluster, demands)[1])
        is_named = demands.schedule is None or isinstance(
            demands.schedule, Schedule
        )  # a function's name may outlive it
        kept = kept_plan(subject, cluster, (demands.key, subject.wishes)) if is_named else None
        plan = None if kept is None else kept.read()
        if plan is None:
            plan = self._plan(args, kwargs, cluster, demands)[1]
            if kept is not None:
                kept.write(plan)
        return plan

    def _note_likeness(self, subject: Subjected, plan: Plan, cluster: Cluster) -> dict[int, int]:
        """Remember where the state lies for steps that are to be like this one; returns the stages of the leaves."""
        stages = self._assembled(subject, plan, cluster).pipeline.stages if plan.is_pipeline else ()
        stage_of = stages_of_leaves(stages)
        program, written = (subject.undivided or subject).program, None
        if subject.opened is not None:
            whole = subject.as_written
            written = Likeness(plan, whole.program.in_keys, types_of(whole.program), whole.roles, {})
        self._likeness = Likeness(plan, program.in_keys, types_of(program), subject.roles, stage_of, written)
        return stage_of

    def _assembled(self, subject: Subjected, plan: Plan, cluster: Cluster) -> Assembled:
        """The pipeline of a plan; the last one is remembered, for a state is born before the first step."""
        if self._pipeline is None or self._pipeline[0] is not plan or self._pipeline[1] != cluster:
            whole = assembled(plan, subject, cluster, donates_state=self._options.demands.donate_state)
            self._pipeline = plan, cluster, whole
        return self._pipeline[2]
