//! Records how this extension was built, for `persia_core.BUILD_INFO`.

use std::process::Command;

fn main() {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let version = Command::new(rustc)
        .arg("--version")
        .output()
        .ok()
        .and_then(|out| String::from_utf8(out.stdout).ok())
        .unwrap_or_default();
    println!("cargo:rustc-env=PERSIA_RUSTC={}", version.trim());
    for (name, variable) in [("PERSIA_PROFILE", "PROFILE"), ("PERSIA_TARGET", "TARGET")] {
        println!("cargo:rustc-env={name}={}", std::env::var(variable).unwrap_or_default());
    }
    println!("cargo:rerun-if-changed=build.rs");
}
