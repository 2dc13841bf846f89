"""Files that run the exported test where no operating system does: on a microcontroller's board, and in Node.js."""

from __future__ import annotations

from mithril_cbackend.compile_target import CompileTarget


def host_files(target: CompileTarget) -> dict[str, str]:
    """Return the additional files of a target's test by name."""
    if target.platform == "bare":
        return {"board.ld": BOARD, "startup.c": STARTUP}
    return {"run.mjs": NODE} if target.platform == "wasi" else {}


BOARD = """\
/* Memory of the board mps2-an500 (Cortex-M7) of QEMU, for the test. Firmware has its own linker script. */
MEMORY {
  flash (rx) : ORIGIN = 0x00000000, LENGTH = 4M
  sram (rwx) : ORIGIN = 0x20000000, LENGTH = 4M
  psram (rwx) : ORIGIN = 0x60000000, LENGTH = 16M
}
ENTRY(reset)
SECTIONS {
  .text : { KEEP(*(.vectors)) *(.text*) *(.rodata*) } > flash
  .init_array : { *(.init_array*) } > flash
  .ARM.exidx : { __exidx_start = .; *(.ARM.exidx*) __exidx_end = .; } > flash
  .data : { *(.data*) } > sram
  .bss (NOLOAD) : { __bss_start__ = .; *(.bss*) *(COMMON) __bss_end__ = .; } > psram
  . = ALIGN(8);
  end = .;
  __end__ = .;
  __stack = ORIGIN(sram) + LENGTH(sram);
}
"""
STARTUP = """\
/* The test's first instructions on a Cortex-M with floating-point unit. Firmware has its own startup code. */
#include <stdint.h>

extern uint32_t __stack;
void _start(void);
void reset(void);

void reset(void) {
  *(volatile uint32_t *)0xE000ED88u |= 0xFu << 20; /* enable the floating-point unit */
  __asm__ volatile("dsb\\n isb");
  _start();
}

__attribute__((section(".vectors"), used)) static const struct {
  uint32_t *stack;
  void (*reset)(void);
} vectors = {&__stack, reset};
"""
NODE = """\
// node run.mjs PROGRAM: run a WebAssembly program of the system interface WASI.
import { readFileSync } from 'node:fs';
import { WASI } from 'node:wasi';

const program = process.argv[2];
const wasi = new WASI({ version: 'preview1', args: [program], preopens: { '.': '.' }, returnOnExit: true });
const module = await WebAssembly.compile(readFileSync(program));
const instance = await WebAssembly.instantiate(module, wasi.getImportObject());
process.exit(wasi.start(instance));
"""
