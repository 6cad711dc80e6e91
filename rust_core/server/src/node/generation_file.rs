//! [`GenerationFile`]: the highest generation that began on a server, in a directory that one process owns.
//!
//! `admission.rs` refuses requests of an older generation.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use persia_store::checkpoint::replace_file;
use persia_types::TablesError;
use rustix::fs::{FlockOperation, flock};

use crate::exit::Exit;

const FILE: &str = "generation";
/// The name that the first version gave the file. A file of this name is read, too.
const FIRST_FILE: &str = "epoch";
const LOCK: &str = "lock";

/// The highest generation, in a directory or only in memory.
#[derive(Debug)]
pub struct GenerationFile {
    dir: Option<PathBuf>,
    generation: Mutex<u64>,
    /// The lock is held as long as this file is open.
    _lock: Option<File>,
}

impl GenerationFile {
    /// Lock the directory, which is created if it does not exist, and read the generation, which is 0 if there
    /// is no file. Without a directory, the generation is kept in memory only.
    ///
    /// # Errors
    /// `Again` if another process uses the directory; `Corrupt` if a file does not contain a generation;
    /// `Usage` if the directory or a file cannot be used.
    pub fn open(dir: Option<&Path>) -> Result<Self, Exit> {
        let Some(dir) = dir else {
            return Ok(Self { dir: None, generation: Mutex::new(0), _lock: None });
        };
        let unusable = |error: io::Error| {
            let mut text = format!("cannot use PERSIA_DATA_DIR={}: {error}", dir.display());
            if error.kind() == io::ErrorKind::PermissionDenied {
                let uid = rustix::process::getuid().as_raw();
                text += &format!("; user {uid} must be able to write there");
            }
            Exit::Usage(text)
        };
        fs::create_dir_all(dir).map_err(unusable)?;
        let lock = File::options().create(true).truncate(false).write(true).open(dir.join(LOCK));
        let lock = lock.map_err(unusable)?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|error| match error {
            rustix::io::Errno::WOULDBLOCK => Exit::Again(format!(
                "PERSIA_DATA_DIR={} is in use by another server; stop that server, or use a separate folder",
                dir.display()
            )),
            error => unusable(error.into()),
        })?;
        // An older version writes only `FIRST_FILE`, and may have used this directory last. The higher generation
        // therefore counts.
        let mut highest = 0;
        for path in [FILE, FIRST_FILE].map(|name| dir.join(name)) {
            match fs::read_to_string(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(Exit::Usage(format!("cannot read {}: {error}", path.display()))),
                Ok(text) => {
                    let generation: u64 = text.trim().parse().map_err(|_| damaged(&path, &text))?;
                    highest = highest.max(generation);
                }
            }
        }
        Ok(Self::locked(dir, highest, lock))
    }

    fn locked(dir: &Path, generation: u64, lock: File) -> Self {
        Self { dir: Some(dir.to_owned()), generation: Mutex::new(generation), _lock: Some(lock) }
    }

    /// The highest generation so far.
    pub fn get(&self) -> u64 {
        *self.generation.lock()
    }

    /// Make `generation` the highest, durably if there is a directory.
    ///
    /// # Errors
    /// `Io`, after which the generation is unchanged.
    pub fn set(&self, generation: u64) -> Result<(), TablesError> {
        let mut current = self.generation.lock();
        if let Some(dir) = &self.dir {
            replace_file(&dir.join(FILE), format!("{generation}\n").as_bytes())?;
        }
        *current = generation;
        Ok(())
    }
}

fn damaged(path: &Path, text: &str) -> Exit {
    let text: String = text.chars().take(40).collect();
    Exit::Corrupt(format!(
        "{} holds {text:?}, which is not a generation number; remove the file when no trainer of an earlier run is running",
        path.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generation_outlives_its_process() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        let file = GenerationFile::open(Some(&path)).unwrap();
        assert_eq!(file.get(), 0);
        file.set(7).unwrap();
        drop(file);
        assert_eq!(GenerationFile::open(Some(&path)).unwrap().get(), 7);
    }

    #[test]
    fn a_directory_of_the_first_version_keeps_its_generation() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FIRST_FILE), "6\n").unwrap();
        let file = GenerationFile::open(Some(dir.path())).unwrap();
        assert_eq!(file.get(), 6);
        file.set(7).unwrap();
        drop(file);
        assert_eq!(GenerationFile::open(Some(dir.path())).unwrap().get(), 7);
        fs::write(dir.path().join(FIRST_FILE), "9\n").unwrap(); // written by the first version again
        assert_eq!(GenerationFile::open(Some(dir.path())).unwrap().get(), 9);
    }

    #[test]
    fn a_second_owner_and_a_damaged_file_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let first = GenerationFile::open(Some(dir.path())).unwrap();
        let second = GenerationFile::open(Some(dir.path())).unwrap_err();
        assert!(matches!(second, Exit::Again(_)) && second.to_string().contains("in use"), "{second}");
        drop(first);
        fs::write(dir.path().join(FILE), "seven").unwrap();
        let damaged = GenerationFile::open(Some(dir.path())).unwrap_err();
        assert!(matches!(damaged, Exit::Corrupt(_)) && damaged.to_string().contains("seven"), "{damaged}");
    }

    #[test]
    fn a_directory_that_cannot_be_created_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let error = GenerationFile::open(Some(&file.join("data"))).unwrap_err();
        assert!(matches!(error, Exit::Usage(_)) && error.to_string().contains("file/data"), "{error}");
    }
}
