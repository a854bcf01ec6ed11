//! The contexts of this agent: made, found, listed, ended.
//!
//! Invariant: a language has at most one default context, however many requests ask for it at once.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Semaphore;

use super::context::Context;
use crate::envs;
use crate::http::reply::Failure;
use crate::http::router::Agent;

/// Each is a process of some tens of megabytes, and three connections.
pub const MAX_CONTEXTS: usize = 32;

pub struct Contexts {
    table: Mutex<Table>,
    slots: Arc<Semaphore>,
}

#[derive(Default)]
struct Table {
    /// In the order they were made.
    all: Vec<Arc<Context>>,
    /// Ids of the contexts for requests that name none, by language.
    defaults: HashMap<String, String>,
}

impl Default for Contexts {
    fn default() -> Self {
        Contexts { table: Mutex::default(), slots: Arc::new(Semaphore::new(MAX_CONTEXTS)) }
    }
}

impl Contexts {
    /// Makes a context and waits for its kernel. A caller that goes away leaves it to be listed and deleted.
    pub(super) async fn create(
        &self,
        agent: &Arc<Agent>,
        language: &str,
        cwd: Option<String>,
    ) -> Result<Arc<Context>, Failure> {
        let context = self.open(&mut self.lock(), agent, language, cwd)?;
        self.ready(&context).await?;
        Ok(context)
    }

    /// The context of a language for requests that name none; made by the first of them.
    pub(super) async fn default_for(
        &self,
        agent: &Arc<Agent>,
        language: &str,
        cwd: Option<String>,
    ) -> Result<Arc<Context>, Failure> {
        let context = {
            let mut table = self.lock();
            let id = table.defaults.get(language).cloned();
            match id.and_then(|id| table.all.iter().find(|context| context.id == id).cloned()) {
                Some(context) => context,
                None => {
                    let context = self.open(&mut table, agent, language, cwd)?;
                    table.defaults.insert(language.to_owned(), context.id.clone());
                    context
                }
            }
        };
        self.ready(&context).await?;
        Ok(context)
    }

    fn open(
        &self,
        table: &mut Table,
        agent: &Arc<Agent>,
        language: &str,
        cwd: Option<String>,
    ) -> Result<Arc<Context>, Failure> {
        let folder = folder(agent, cwd.as_deref())?;
        let slot = Arc::clone(&self.slots).try_acquire_owned().map_err(|_| {
            Failure::runtime(format!(
                "there are {MAX_CONTEXTS} code contexts, which is the most; delete some"
            ))
        })?;
        let context = Context::open(agent, language, (cwd, folder), slot);
        table.all.push(Arc::clone(&context));
        Ok(context)
    }

    async fn ready(&self, context: &Arc<Context>) -> Result<(), Failure> {
        context.ready().await.map_err(|why| {
            self.remove(|other| other.id == context.id);
            Failure::runtime(why)
        })
    }

    pub(super) fn get(&self, id: &str) -> Option<Arc<Context>> {
        self.lock().all.iter().find(|context| context.id == id).cloned()
    }

    /// All, or those of one language.
    pub(super) fn list(&self, language: Option<&str>) -> Vec<Arc<Context>> {
        let table = self.lock();
        let wanted =
            table.all.iter().filter(|context| language.is_none_or(|wanted| context.language == wanted));
        wanted.cloned().collect()
    }

    /// Takes contexts out of the table; ending them is the caller's.
    pub(super) fn remove(&self, which: impl Fn(&Context) -> bool) -> Vec<Arc<Context>> {
        let mut table = self.lock();
        let (removed, kept) = std::mem::take(&mut table.all).into_iter().partition(|context| which(context));
        table.all = kept;
        let removed: Vec<Arc<Context>> = removed;
        table.defaults.retain(|_, id| removed.iter().all(|context| context.id != *id));
        removed
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        // Whoever asked for one of these and went away does not remove it.
        table.all.retain(|context| !context.has_failed());
        table
    }
}

/// The working directory of a context; variables and `~` as in every path of the API.
fn folder(agent: &Agent, cwd: Option<&str>) -> Result<PathBuf, Failure> {
    let Some(cwd) = cwd else { return Ok(agent.cwd.clone()) };
    if cwd.contains('\0') {
        return Err(Failure::invalid("invalid request, validation error cwd must not contain a NUL byte"));
    }
    let mut env = agent.env.clone();
    env.extend(envs::read_file(&agent.env_file, &agent.env));
    let expanded = envs::expand_path(cwd, &env, &agent.home)
        .map_err(|error| Failure::invalid(format!("invalid request, validation error {error}")))?;
    Ok(envs::clean(&agent.cwd, &expanded))
}
