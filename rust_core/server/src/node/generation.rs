//! [`GenerationFile`]: the highest generation a server ever accepted, kept on disk and owned by one process.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use persia_types::TablesError;
use rustix::fs::{FlockOperation, flock};

use crate::exit::Exit;

// Its name in the first version, kept so that a data directory outlives an upgrade.
const FILE: &str = "epoch";
const LOCK: &str = "lock";

/// The generation, in a directory or, without one, in memory only.
#[derive(Debug)]
pub struct GenerationFile {
    dir: Option<PathBuf>,
    generation: Mutex<u64>,
    /// Holding it open holds the lock.
    _lock: Option<File>,
}

impl GenerationFile {
    /// Take the directory, made where it is missing, and read the generation in it; 0 where there is none.
    ///
    /// # Errors
    /// `Again` when another process has the directory, `Corrupt` for a file that holds no generation, `Usage` when the
    /// directory can't be used.
    pub fn open(dir: Option<&Path>) -> Result<Self, Exit> {
        let Some(dir) = dir else {
            return Ok(Self { dir: None, generation: Mutex::new(0), _lock: None });
        };
        let unusable = |error: io::Error| {
            let uid = rustix::process::getuid().as_raw();
            Exit::Usage(format!(
                "--data-dir {}: {error}; user {uid} must be able to write there",
                dir.display()
            ))
        };
        fs::create_dir_all(dir).map_err(unusable)?;
        let lock = File::options().create(true).truncate(false).write(true).open(dir.join(LOCK));
        let lock = lock.map_err(unusable)?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|error| match error {
            rustix::io::Errno::WOULDBLOCK => Exit::Again(format!(
                "--data-dir {} is in use by another server; stop that one, or give each its own directory",
                dir.display()
            )),
            error => unusable(error.into()),
        })?;
        let generation = match fs::read_to_string(dir.join(FILE)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
            Err(error) => return Err(unusable(error)),
            Ok(text) => text.trim().parse().map_err(|_| {
                let path = dir.join(FILE);
                Exit::Corrupt(format!(
                    "{} holds {:?} and no generation; remove it when no trainer of an earlier run is alive",
                    path.display(),
                    text.chars().take(40).collect::<String>()
                ))
            })?,
        };
        Ok(Self { dir: Some(dir.to_owned()), generation: Mutex::new(generation), _lock: Some(lock) })
    }

    /// The highest generation there was.
    pub fn get(&self) -> u64 {
        *self.generation.lock()
    }

    /// Make `generation` the highest, durably.
    ///
    /// # Errors
    /// `Io`: it is then not.
    pub fn set(&self, generation: u64) -> Result<(), TablesError> {
        let mut current = self.generation.lock();
        if let Some(dir) = &self.dir {
            write(dir, generation).map_err(|source| TablesError::Io { path: dir.join(FILE), source })?;
        }
        *current = generation;
        Ok(())
    }
}

fn write(dir: &Path, generation: u64) -> io::Result<()> {
    let temporary = dir.join(".generation.tmp");
    let mut file = File::create(&temporary)?;
    writeln!(file, "{generation}")?;
    file.sync_all()?;
    fs::rename(&temporary, dir.join(FILE))?;
    File::open(dir)?.sync_all() // the rename itself must survive
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
    fn a_directory_that_cannot_be_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let error = GenerationFile::open(Some(&file.join("data"))).unwrap_err();
        assert!(matches!(error, Exit::Usage(_)) && error.to_string().contains("file/data"), "{error}");
    }
}
