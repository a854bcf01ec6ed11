//! What the protocol asks: who we are, which tools and skills there are, and calls.

use std::sync::{Arc, LazyLock};

use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    model::{
        CallToolRequestParams, CallToolResponse, GetSkillRequestParams, GetSkillResult, Implementation,
        ListResourcesResult, ListSkillsResult, ListToolsResult, PaginatedRequestParams,
        ReadResourceRequestParams, ReadResourceResponse, ReadResourceResult, ServerCapabilities,
        ServerConfig, Tool,
    },
    service::RequestContext,
};

use super::{call::Call, catalog::Catalog, session::Session, skills};

/// What a model should know before it looks at the tools.
const INSTRUCTIONS: &str = "\
Sandboxes are isolated Linux machines for code that must not run on this one. sandbox_create returns a sandbox_id; give it to \
every other tool. command_run runs shell commands and returns exit code, stdout and stderr; start servers and long work with \
background true and read command_logs. file_read, file_write and their kin move content in and out without a shell. \
sandbox_get_endpoint gives the address of a port in a sandbox. A sandbox is removed when its time to live is over: renew it while \
you need it, kill it when you are done. Output is cut when it is long; the answer says so and how to get the rest. The skills \
among the resources describe each of these tasks in more detail.";

static CATALOG: LazyLock<Arc<Catalog>> = LazyLock::new(Catalog::all);

/// Answers one client.
#[derive(Debug, Clone)]
pub struct Handler {
    session: Session,
}

impl Handler {
    /// A handler within a run.
    pub fn new(session: Session) -> Self {
        Self { session }
    }
}

impl ServerHandler for Handler {
    fn get_info(&self) -> ServerConfig {
        let capabilities =
            ServerCapabilities::builder().enable_tools().enable_resources().enable_skills().build();
        let us =
            Implementation::new("sandglass", env!("CARGO_PKG_VERSION")).with_title("Sandglass sandboxes");
        ServerConfig::new(capabilities).with_server_info(us).with_instructions(INSTRUCTIONS)
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(CATALOG.tools()))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        CATALOG.tool(name)
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let _under_way = self.session.calls().token();
        let call = Call::new(self.session.clone(), context);
        let result = CATALOG.call(&request.name, call, request.arguments.unwrap_or_default()).await;
        let unknown = || ErrorData::invalid_params(format!("there is no tool `{}`", request.name), None);
        result.map(CallToolResponse::from).ok_or_else(unknown)
    }

    async fn list_resources(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        Ok(ListResourcesResult::with_all_items(skills::resources()))
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        match skills::contents(&request.uri) {
            Some(contents) => Ok(ReadResourceResult::new(vec![contents]).into()),
            None => Err(ErrorData::resource_not_found(format!("there is no resource {}", request.uri), None)),
        }
    }

    async fn list_skills(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListSkillsResult, ErrorData> {
        Ok(ListSkillsResult::with_all_items(skills::all()))
    }

    async fn get_skill(
        &self,
        request: GetSkillRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<GetSkillResult, ErrorData> {
        let found = skills::all().into_iter().find(|skill| skill.uri == request.uri);
        let unknown = || ErrorData::invalid_params(format!("there is no skill {}", request.uri), None);
        found.map(GetSkillResult::new).ok_or_else(unknown)
    }
}
