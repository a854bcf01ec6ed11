//! What a model may read on how to use the tools: one document for each task.
//!
//! Offered as resources, and through the protocol's skills extension to clients that know it.

use rmcp::model::{Resource, ResourceContents, Skill, SkillFrontmatter, SkillResource, SkillResources};

/// A document, as it is served.
const DOCUMENTS: &[&str] = &[
    include_str!("skills/sandbox-lifecycle.md"),
    include_str!("skills/command-execution.md"),
    include_str!("skills/file-operations.md"),
    include_str!("skills/sandbox-troubleshooting.md"),
];

/// Name and description from a document's front matter.
fn front_matter(document: &'static str) -> (&'static str, &'static str) {
    let field = |key: &str| {
        let lines = document.lines().skip(1).take_while(|line| *line != "---");
        lines.filter_map(|line| line.split_once(": ")).find(|(name, _)| *name == key).map(|(_, value)| value)
    };
    (field("name").unwrap_or_default(), field("description").unwrap_or_default())
}

fn uri(name: &str) -> String {
    format!("skill://{name}/SKILL.md")
}

/// The documents as resources.
pub fn resources() -> Vec<Resource> {
    let resource = |document: &&'static str| {
        let (name, description) = front_matter(document);
        Resource::new(uri(name), name)
            .with_description(description)
            .with_mime_type("text/markdown")
            .with_size(document.len() as u64)
    };
    DOCUMENTS.iter().map(resource).collect()
}

/// One document.
pub fn contents(wanted: &str) -> Option<ResourceContents> {
    let document = DOCUMENTS.iter().find(|document| uri(front_matter(document).0) == wanted)?;
    Some(ResourceContents::text(*document, wanted).with_mime_type("text/markdown"))
}

/// The documents as skills.
pub fn all() -> Vec<Skill> {
    let skill = |document: &&'static str| {
        let (name, description) = front_matter(document);
        let file = SkillResource::from_bytes(uri(name), document.as_bytes());
        Skill::new(uri(name), SkillFrontmatter::new(name, description), SkillResources::Files(vec![file]))
    };
    DOCUMENTS.iter().map(skill).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mcp::catalog::Catalog;

    #[test]
    fn every_document_is_a_valid_skill_and_a_resource_that_can_be_read() {
        rmcp::model::validate_skills(&all()).unwrap();
        for resource in resources() {
            assert!(resource.description.is_some_and(|text| text.len() > 40), "{}", resource.name);
            assert!(contents(&resource.uri).is_some(), "{}", resource.uri);
        }
        assert!(contents("skill://nothing/SKILL.md").is_none());
    }

    #[test]
    fn documents_name_only_tools_that_exist() {
        let tools = Catalog::all();
        let like_a_tool = |word: &&str| {
            ["sandbox_", "command_", "file_", "snapshot_"].iter().any(|start| word.starts_with(start))
        };
        for document in DOCUMENTS {
            let words = document.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
            for word in
                words.filter(like_a_tool).filter(|word| !matches!(*word, "sandbox_id" | "snapshot_id"))
            {
                assert!(tools.tool(word).is_some(), "{word}");
            }
        }
    }
}
