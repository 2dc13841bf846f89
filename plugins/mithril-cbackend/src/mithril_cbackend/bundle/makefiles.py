"""The Makefile and CMakeLists.txt of an exported model."""

from __future__ import annotations

from mithril_cbackend.compile_target import CompileTarget


def makefile(name: str, target: CompileTarget, embedded: bool) -> str:
    toolchain = target.toolchain
    text = MAKEFILE.replace("@FLAGS@", target.portable_flags).replace("@ARCH@", toolchain.flags)
    text = text.replace("@CC@", toolchain.default).replace("@NAME@", name)
    text = text.replace("@RUNNER@", f" {toolchain.runner}" if toolchain.runner else "")
    text = text.replace("@LINK@", f" {toolchain.link}" if toolchain.link else "")
    text = text.replace("PIC ?= @PIC@\n", "" if target.platform in ("bare", "wasi") else "PIC ?= -fPIC\n")
    return text.replace("@WEIGHTS@", f" {name}_weights.o" if embedded else "")


def cmake(name: str, target: CompileTarget, embedded: bool) -> str:
    flags = target.portable_flags.replace("-std=c11 ", "")
    text = CMAKE.replace("@FLAGS@", flags).replace("@ARCH@", target.toolchain.flags).replace("@NAME@", name)
    return text.replace("@WEIGHTS@", f" {name}_weights.c" if embedded else "")


MAKEFILE = """\
# make check         compile and run the test against the results of Python
# make lib@NAME@.a      or lib@NAME@.so: the library to link a program with, in addition to -lm
# make THREADS=1 ... run parallel loops with OpenMP, if the model was compiled for several threads
# make ARCH= ...     code for every CPU of this architecture, without this machine's extensions
ifeq ($(origin CC), default)
CC = @CC@
endif
AR ?= ar
ARCH ?= @ARCH@
CFLAGS ?= @FLAGS@ $(ARCH)
LDLIBS ?= -lm
PIC ?= @PIC@
RUN ?=@RUNNER@
PROGRAM ?=@LINK@
ifdef THREADS
override CFLAGS += -fopenmp
endif

all: @NAME@_test

@NAME@_test: @NAME@_test.o @NAME@.o@WEIGHTS@
\t$(CC) $(CFLAGS) $(LDFLAGS) $(PROGRAM) -o $@ $^ $(LDLIBS)

%.o: %.c @NAME@.h
\t$(CC) $(CFLAGS) $(PIC) -c -o $@ $<

lib@NAME@.a: @NAME@.o@WEIGHTS@
\t$(AR) rcs $@ $^

lib@NAME@.so: @NAME@.o@WEIGHTS@
\t$(CC) $(CFLAGS) $(LDFLAGS) -shared -o $@ $^ $(LDLIBS)

check: @NAME@_test
\t$(RUN) ./@NAME@_test

clean:
\trm -f *.o @NAME@_test lib@NAME@.a lib@NAME@.so

.PHONY: all check clean
"""

CMAKE = """\
cmake_minimum_required(VERSION 3.10)
project(@NAME@ C)
set(CMAKE_C_STANDARD 11)
add_library(@NAME@ @NAME@.c@WEIGHTS@)
set(ARCH "@ARCH@" CACHE STRING "flags of the target CPU; empty: every CPU of this architecture")
separate_arguments(ARCH)
target_compile_options(@NAME@ PRIVATE @FLAGS@ ${ARCH})
target_include_directories(@NAME@ PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(@NAME@ PUBLIC m)
add_executable(@NAME@_test @NAME@_test.c)
target_link_libraries(@NAME@_test @NAME@)
enable_testing()
add_test(NAME same_as_python COMMAND @NAME@_test WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
"""
