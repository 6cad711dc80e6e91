//! Infer jobs: a [`Node`] that serves the rows of a checkpoint and refuses every change.

use std::io;
use std::path::{Path, PathBuf};

use persia_store::checkpoint::{CheckpointError, Manifest};
use persia_store::slot_differences;
use persia_types::tables::{Run, ServedCheckpoint};
use persia_types::{Schema, Table, TablesError, Token};

use super::{Fence, GenerationFile, Node, NodeOptions, RecoveryProgress};
use crate::exit::Exit;

/// The configuration key of the checkpoint's directory or URL, for messages.
const KEY: &str = "infer_config.embedding_checkpoint";

/// A checkpoint that has been opened and can be served.
#[derive(Debug)]
pub struct ServableCheckpoint {
    dir: PathBuf,
    manifest: Manifest,
    schema: Schema,
}

impl ServableCheckpoint {
    /// Open the checkpoint in `dir`. No row is read yet. The slots and tables are those with which it was saved, or
    /// the `configured` ones, which must be compatible with its rows.
    ///
    /// # Errors
    /// `Corrupt` if there is no checkpoint that this version can read; `Again` if it cannot be read at the
    /// moment; `Usage` for incompatible slots, for a checkpoint without slots if none are configured, and for
    /// a URL that cannot be used.
    pub fn open(dir: &Path, configured: Option<Schema>) -> Result<Self, Exit> {
        let manifest = Manifest::open(dir).map_err(|error| match &error {
            CheckpointError::Io { source, .. } if source.kind() == io::ErrorKind::InvalidInput => {
                Exit::Usage(cannot_serve(&error)) // a URL that cannot be used
            }
            CheckpointError::Io { .. } => Exit::Again(cannot_serve(&error)),
            _ => Exit::Corrupt(cannot_serve(&error)),
        })?;
        let saved = &manifest.head.run.schema;
        let schema = match configured {
            Some(configured) => {
                let wrong = differences(saved, &configured);
                if !wrong.is_empty() {
                    return Err(Exit::Usage(format!(
                        "the checkpoint {} of {KEY} does not fit the embedding configuration: {}; use the \
                         configuration of the job that saved the checkpoint",
                        dir.display(),
                        wrong.join("; ")
                    )));
                }
                configured
            }
            None if saved.slots.is_empty() => {
                return Err(Exit::Usage(format!(
                    "the checkpoint {} of {KEY} has no slots, because it was imported: set \
                     PERSIA_EMBEDDING_CONFIG or PERSIA_CONFIG to a file that defines the slots to serve",
                    dir.display()
                )));
            }
            None => saved.clone(),
        };
        Ok(Self { dir: dir.to_owned(), manifest, schema })
    }

    /// The slots and tables.
    pub fn schema(&self) -> &Schema {
        &self.schema
    }
}

/// The message for a checkpoint that cannot be served.
fn cannot_serve(error: &dyn std::fmt::Display) -> String {
    format!("cannot serve the checkpoint of {KEY}: {error}")
}

/// The differences that would change the meaning of a checkpoint's rows, with one message for each.
fn differences(saved: &Schema, configured: &Schema) -> Vec<String> {
    let mut wrong = Vec::new();
    for slot in &configured.slots {
        let Some((_, before)) = saved.slot(&slot.name) else { continue };
        for (setting, before, now) in slot_differences((saved, before), (configured, slot)) {
            wrong.push(format!(
                "slot {} has {setting} {before} in the checkpoint, but {now} in the configuration",
                slot.name
            ));
        }
    }
    for table in &configured.tables {
        match saved.tables.iter().find(|before| before.name == table.name) {
            None => wrong.push(format!("the checkpoint has no table {}", table.name)),
            Some(before) if before.dim != table.dim => {
                wrong.push(format!(
                    "table {} has dim {} in the checkpoint, but {} in the configuration",
                    table.name, before.dim, table.dim
                ));
            }
            Some(_) => {}
        }
    }
    let missing = |table: &&Table| !configured.tables.iter().any(|own| own.name == table.name);
    wrong.extend(
        saved
            .tables
            .iter()
            .filter(missing)
            .map(|table| format!("the configuration has no table {}", table.name)),
    );
    wrong
}

impl Node {
    /// Create a server that serves its part of a checkpoint's rows. `progress` shows how much has been read.
    ///
    /// # Errors
    /// `Corrupt` for a damaged checkpoint; `Again` if a disk or object store fails or memory runs out;
    /// `Usage` for settings of the checkpoint's run that are out of range; those of [`Self::new`].
    pub fn serving(
        options: NodeOptions,
        checkpoint: &ServableCheckpoint,
        progress: &RecoveryProgress,
    ) -> Result<Self, Exit> {
        let ServableCheckpoint { dir, manifest, schema } = checkpoint;
        let head = &manifest.head;
        let run = Run {
            job: options.job.clone(),
            generation: manifest.identity(),
            schema: schema.clone(),
            optimizer: None,
            fresh: true,
            continues: 0,
            world_size: 1,
            reproducible: false,
            ..head.run.clone()
        };
        let mut node = Self::empty(options, GenerationFile::open(None)?, None, true)?;
        let failed = |error: TablesError| match error {
            TablesError::BadRun { what } => Exit::Usage(cannot_serve(&what)),
            TablesError::Corrupt { .. } | TablesError::Foreign { .. } => Exit::Corrupt(cannot_serve(&error)),
            other => Exit::Again(cannot_serve(&other)),
        };
        node.start(&run).map_err(failed)?;
        let files = manifest.shards();
        progress.expect(node.store.held_files(&files).iter().map(|file| file.bytes).sum());
        node.store.restore_rows(dir, &files, &|bytes| progress.advance(bytes)).map_err(failed)?;
        node.served = Some(ServedCheckpoint {
            job: run.job,
            path: dir.display().to_string(),
            step: head.step,
            schema: run.schema,
            inputs: head.inputs.as_ref().map(|raw| raw.get().to_owned()),
        });
        let rows: u64 = node.stats().map_err(failed)?.rows.iter().sum();
        tracing::info!(checkpoint = %dir.display(), step = head.step, rows, "serving a checkpoint");
        Ok(node)
    }

    /// Whether this server serves a checkpoint.
    pub fn serves(&self) -> bool {
        self.served.is_some()
    }

    /// Refuse a request that would change or save rows in an infer job.
    pub(super) fn refuse_change(&self) -> Result<(), TablesError> {
        let Some(served) = &self.served else { return Ok(()) };
        let what = format!(
            "it serves the checkpoint {} and accepts no training, save or load (job_type: Infer); train on servers \
             whose global_config.yml has job_type: Train",
            served.path
        );
        Err(TablesError::Incompatible { peer: self.peer.clone(), what })
    }

    /// Refuse a look-up of an infer job by a client that expects the rows of a different checkpoint.
    pub(super) fn check_served(&self, token: Token) -> Result<(), TablesError> {
        let Some(served) = &self.served else { return Ok(()) };
        let Fence { job, generation } = self.current()?;
        if (job, generation) == (token.job, token.generation) {
            return Ok(());
        }
        let what = format!(
            "it serves step {} of {}, not the checkpoint that it served when this process connected: load the \
             model of that step and call wait_for_serving() again, or restart this process",
            served.step, served.path
        );
        Err(TablesError::Incompatible { peer: self.peer.clone(), what })
    }
}

/// The directory or URL of the checkpoint to serve.
///
/// # Errors
/// `Usage` if none is given.
pub fn checkpoint_dir(given: Option<&str>) -> Result<&Path, Exit> {
    given.map(Path::new).ok_or_else(|| {
        Exit::Usage(format!(
            "no checkpoint to serve: with job_type: Infer, set common_config.{KEY} in global_config.yml to the folder \
             or URL of a checkpoint"
        ))
    })
}

#[cfg(test)]
mod tests {
    use persia_types::{HashStack, Pooling, Slot};

    use super::*;

    type Change<'a> = &'a dyn Fn(&mut Schema);

    fn schema() -> Schema {
        let slot = |name: &str, table| Slot { name: name.into(), table, ..Slot::default() };
        Schema {
            slots: vec![slot("user", 0), slot("item", 1)],
            tables: vec![Table::new("user", 4), Table::new("goods", 8)],
        }
    }

    #[test]
    fn slots_that_give_rows_another_meaning_are_named() {
        let saved = schema();
        let said = |change: Change<'_>| {
            let mut configured = schema();
            change(&mut configured);
            differences(&saved, &configured).join("; ")
        };
        assert_eq!(said(&|_| ()), "");
        // The order of tables, and settings that only affect training, make no difference.
        let reversed = |schema: &mut Schema| {
            schema.tables.reverse();
            schema.slots.iter_mut().for_each(|slot| slot.table = 1 - slot.table);
            schema.tables[0].settings.ttl = Some(7);
        };
        assert_eq!(said(&reversed), "");
        let changes: [(Change<'_>, &str); 5] = [
            (
                &|schema| schema.slots[0].pooling = Pooling::Mean,
                "slot user has pooling sum in the checkpoint, but mean in the configuration",
            ),
            (
                &|schema| schema.slots[1].hash_stack = Some(HashStack { rounds: 2, buckets: 9 }),
                "slot item has hash_stack_config none in the checkpoint, but with hash_stack_rounds 2",
            ),
            (
                &|schema| schema.tables[1].dim = 16,
                "table goods has dim 8 in the checkpoint, but 16 in the configuration",
            ),
            (
                &|schema| schema.tables[1].name = "items".into(),
                "slot item has table goods in the checkpoint, but items in the configuration",
            ),
            (&|schema| schema.tables.push(Table::new("city", 2)), "the checkpoint has no table city"),
        ];
        for (change, expected) in changes {
            let found = said(change);
            assert!(found.contains(expected), "{found}");
        }
    }

    #[test]
    fn without_a_folder_the_key_is_named() {
        let Err(Exit::Usage(text)) = checkpoint_dir(None) else { panic!("accepted") };
        assert!(text.contains("infer_config.embedding_checkpoint"), "{text}");
        assert!(matches!(ServableCheckpoint::open(Path::new("/no/such"), None), Err(Exit::Corrupt(_))));
        let wrong = ServableCheckpoint::open(Path::new("gs://no/such"), None);
        assert!(matches!(wrong, Err(Exit::Usage(_))), "{wrong:?}");
    }
}
