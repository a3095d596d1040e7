"""Planted faults: copies of the installed libraries that die in native code under one condition.

`libllama` of such a folder is a few lines of C that need the real one. The dynamic linker finds its
symbols first, so it can replace any function of llama.cpp or ggml: here the one that computes a
graph on the CPU, which sees every operation before it is computed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

_COMPUTE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

extern int ggml_graph_n_nodes(void * graph);
extern void * ggml_graph_node(void * graph, int i);
extern const char * ggml_op_desc(const void * tensor);
extern const char * ggml_backend_buffer_name(void * buffer);

struct tensor {
    int32_t type; void * buffer; int64_t ne[4]; size_t nb[4]; int32_t op, params[16], flags;
    struct tensor * src[10];
};
struct plan { size_t size; void * data; int32_t n_threads; };

static int does(struct tensor * node, const char * name) {
    return !strcmp(ggml_op_desc(node), name);
}

static int is_in(struct tensor * tensor, const char * name) {
    return tensor && tensor->buffer && !strcmp(ggml_backend_buffer_name(tensor->buffer), name);
}

static int is_repacked(struct tensor * node) {
    struct tensor * weights = node->src[0];
    return does(node, "MUL_MAT") && weights->buffer && !is_in(weights, "CPU")
        && !is_in(weights, "CPU_Mapped");
}

int ggml_graph_compute(void * graph, struct plan * plan) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        struct tensor * node = ggml_graph_node(graph, i);
        if (CONDITION) raise(SIGNAL);
    }
    int (*real)(void *, struct plan *) = dlsym(RTLD_NEXT, "ggml_graph_compute");
    return real(graph, plan);
}
"""
_START = r"""
#include <signal.h>
__attribute__((constructor)) static void start(void) { raise(SIGNAL); }
"""

FAULTS = {
    "kernel": (_COMPUTE, "SIGILL", 'does(node, "MUL_MAT")'),
    "repacked": (_COMPUTE, "SIGSEGV", "is_repacked(node)"),
    "start": (_START, "SIGILL", "1"),
}
"""Of each fault the source, the signal, and the condition."""


def plant(name: str, folder: Path) -> Path:
    """A new folder with libraries that have this fault: for `--lib`."""
    spec = find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    libraries = Path(shutil.copytree(Path(spec.origin).parent / "lib", folder / name / "bin"))
    for link in libraries.glob("*.so"):
        link.unlink()
    source, number, condition = FAULTS[name]
    code = folder / name / "fault.c"
    code.write_text(f"#define SIGNAL {number}\n#define CONDITION {condition}\n{source}")
    needed = [f"-l:{file.name}" for file in sorted(libraries.glob("lib*.so.?"))]
    flags = ["-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", "-Wl,--disable-new-dtags"]
    linked = [*flags, "-L", str(libraries), *needed, "-ldl"]
    subprocess.run(
        ["gcc", "-shared", "-fPIC", code, *linked, "-o", libraries / "libllama.so"], check=True
    )
    return libraries


LIBLLAMA = {"darwin": "libllama.dylib", "win32": "llama.dll"}.get(sys.platform, "libllama.so")
