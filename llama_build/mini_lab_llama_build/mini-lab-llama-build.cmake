# How llama-cpp-python's build differs here from its default: it builds less, and GCC compiles the AMX code correctly.
#
# CMake reads this file when it enables C++ (CMAKE_USER_MAKE_RULES_OVERRIDE_CXX), after it has identified the compiler and
# before the rest of llama-cpp-python's CMakeLists.txt.

# llama.cpp's library `common` (argument and chat parsers, templates, JSON) serves its own programs, and nothing calls it
# through ctypes. It is more than half of the work of a build. llama-cpp-python forces the option on in CMake's cache. A
# normal variable that is set before has priority over the cache, and set(... CACHE) leaves it alone (CMake's policy
# CMP0126, new in 3.21, which llama-cpp-python requires). The multimodal library does not need `common`.
set(LLAMA_BUILD_COMMON OFF)

# Older GCCs compile llama.cpp's AMX code wrongly: on a CPU with AMX every run then ends with SIGSEGV or SIGILL.
#
# Before it uses AMX, llama.cpp fills a struct of 64 bytes and hands its address to _tile_loadconfig. The amxtileintrin.h
# of these GCCs declares that this reads only the first 8 bytes. GCC therefore removes the other stores as dead, and the
# CPU loads what happened to be in memory. These two options make GCC keep the stores. Debian's GCC 11.3 and 12.2 have
# the wrong header, its 13.3 and 14.2 have a corrected one; which releases between them were corrected is not known here,
# so all before 15 get the options. Other compilers do not need them, and clang refuses them.
#
# The options are not added to CMAKE_CXX_FLAGS, because a user's own -DCMAKE_CXX_FLAGS would replace them.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 15
        AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fno-dse> $<$<COMPILE_LANGUAGE:CXX>:-fno-tree-dse>)
endif()
