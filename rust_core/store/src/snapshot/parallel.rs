//! Jobs on several threads.

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

/// Run `work` for each of `0..jobs`.
pub(crate) fn for_each_job(jobs: usize, threads: usize, work: impl Fn(usize) + Sync) {
    let Ok(_) = run_jobs(
        jobs,
        threads,
        || (),
        |(), job| {
            work(job);
            Ok::<(), Infallible>(())
        },
    );
}

/// Run `work` for each of `0..jobs`, and pass it the state of its thread. Returns the results in the order of jobs, or
/// the first error, after which no more jobs are started.
pub(crate) fn run_jobs<S, T: Send, E: Send>(
    jobs: usize,
    threads: usize,
    thread_state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::with_capacity(jobs));
    let failed = Mutex::new(None);
    let worker = || {
        let mut state = thread_state();
        while failed.lock().is_none() {
            let job = next.fetch_add(1, Ordering::Relaxed);
            if job >= jobs {
                return;
            }
            match work(&mut state, job) {
                Ok(result) => done.lock().push((job, result)),
                Err(error) => drop(failed.lock().get_or_insert(error)),
            }
        }
    };
    // The caller's thread runs no job, because `thread_state` may change the priority of the thread.
    std::thread::scope(|scope| {
        for _ in 0..threads.min(jobs) {
            scope.spawn(worker);
        }
    });
    if let Some(error) = failed.into_inner() {
        return Err(error);
    }
    let mut done = done.into_inner();
    done.sort_unstable_by_key(|(job, _)| *job);
    Ok(done.into_iter().map(|(_, result)| result).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_keep_the_order_of_jobs() {
        let squares = run_jobs(100, 4, || (), |(), job| Ok::<_, ()>(job * job)).unwrap();
        assert!(squares.iter().enumerate().all(|(job, square)| *square == job * job));
        assert_eq!(run_jobs(0, 4, || (), |(), _| Ok::<(), ()>(())), Ok(vec![]));
    }

    #[test]
    fn an_error_is_returned_and_ends_the_work() {
        let started = AtomicUsize::new(0);
        let result = run_jobs(
            1_000_000,
            2,
            || (),
            |(), job| {
                started.fetch_add(1, Ordering::Relaxed);
                if job == 3 { Err("no") } else { Ok(()) }
            },
        );
        assert_eq!(result, Err("no"));
        assert!(started.into_inner() < 1_000_000);
    }
}
