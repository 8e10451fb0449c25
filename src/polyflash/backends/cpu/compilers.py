"""numba's compiler with the passes that this engine's functions need, and machine code of kernels alone.

As it comes, it also looks for arrays to fuse, closures, loops over literals and exceptions with arguments,
and makes machine code of every function that a kernel inlines, which takes a quarter of a kernel's time or
more.
"""

from __future__ import annotations

from typing import Any

from numba.core import codegen, compiler, compiler_machinery, typed_passes, untyped_passes


class InlinedLibrary(codegen.JITCodeLibrary):
    """The code of a function that its callers inline, optimize and turn into instructions."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


@compiler_machinery.register_pass(mutates_CFG=True, analysis_only=False)
class InlinedLowering(typed_passes.NativeLowering):
    """Lowering into an `InlinedLibrary`, which kernels link."""

    _name = "polyflash_inlined_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = InlinedLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        entry: Any = [].append  # callers know a function by a builtin one: each has its own
        state.targetctx.insert_user_function(entry, state.cr.fndesc, [state.library])
        state.cr = state.cr._replace(cfunc=entry)
        return True


class KernelCompiler(compiler.CompilerBase):
    """Passes for functions whose every variable has one type: addresses, counts, blocks of words."""

    lowering: Any = typed_passes.NativeLowering

    def define_pipelines(self) -> list[Any]:
        passes = (
            untyped_passes.TranslateByteCode,
            untyped_passes.FixupArgs,
            untyped_passes.IRProcessing,
            untyped_passes.DeadBranchPrune,
            untyped_passes.ReconstructSSA,
            typed_passes.NopythonTypeInference,
            typed_passes.PreLowerStripPhis,
            typed_passes.IRLegalization,
            self.lowering,
            typed_passes.NoPythonBackend,
        )
        manager = compiler_machinery.PassManager("polyflash")
        for each in passes:
            manager.add_pass(each, each.__name__)
        manager.finalize()
        return [manager]


class InlinedCompiler(KernelCompiler):
    lowering = InlinedLowering


KERNEL: dict[str, Any] = {"forceinline": True, "pipeline_class": KernelCompiler}  # of `cfunc`
# Of `njit`: inlined, so nothing is seen to raise and objects need no Python symbol.
INLINED: dict[str, Any] = {
    "forceinline": True,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "pipeline_class": InlinedCompiler,
}
