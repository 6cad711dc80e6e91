//! The kernels' source, compiled for the CPU.

use std::path::Path;
use std::process::Command;

use libloading::{Library, Symbol};
use persia_cuda::kernels::{Job, Kernel};

type Gather = unsafe extern "C" fn(*const Job, u32, u32);
type Sum = unsafe extern "C" fn(*const Job, u32, *mut u32, u32);

/// The shared library that is compiled from the source.
pub(crate) struct Shim {
    library: Library,
    _folder: tempfile::TempDir,
}

impl Shim {
    pub(crate) fn compile() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("kernels.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/shim.cpp");
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
        // Operations are not fused, as in the kernels for devices.
        let flags =
            ["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"];
        let mut command = Command::new(&compiler);
        command.args(flags).arg("-Wno-maybe-uninitialized").arg(&source).arg("-o").arg(&file);
        let done = command.output().unwrap_or_else(|error| {
            panic!("{compiler}: {error}; these tests need a C++ compiler: apt-get install g++, or set CXX")
        });
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        // SAFETY: this is a library of plain functions, compiled above.
        let library = unsafe { Library::new(&file).unwrap() };
        Self { library, _folder: folder }
    }

    pub(crate) fn function<T>(&self, name: &str) -> Symbol<'_, T> {
        // SAFETY: the types are those of shim.cpp.
        unsafe { self.library.get(name.as_bytes()).unwrap() }
    }

    /// Run jobs on the memory of this process. Returns the flag.
    pub(crate) fn launch(&self, kernel: Kernel, jobs: &[Job], blocks: u32) -> u32 {
        let (count, mut flag) = (jobs.len() as u32, 0);
        // SAFETY: the jobs point to live memory of the sizes that they state.
        unsafe {
            match kernel {
                Kernel::GatherPool => {
                    self.function::<Gather>("run_gather_pool")(jobs.as_ptr(), count, blocks)
                }
                Kernel::GatherRaw => self.function::<Gather>("run_gather_raw")(jobs.as_ptr(), count, blocks),
                Kernel::SegmentSum => {
                    self.function::<Sum>("run_segment_sum")(jobs.as_ptr(), count, &mut flag, blocks);
                }
            }
        }
        flag
    }
}
