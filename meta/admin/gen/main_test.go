package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The generated files equal the output for the .proto files beside them: `make proto` was run.
func TestGenerated(t *testing.T) {
	for _, c := range []struct {
		dir, prefix string
		files       int
	}{{"..", admin, 5}, {"../../../stream/ingest", "penstock/ingest/v1/", 2}} {
		files, err := compile(c.dir, c.prefix)
		if err != nil {
			t.Fatal(err)
		}
		if c.prefix == admin {
			if err := check(files); err != nil {
				t.Fatal(err)
			}
		}
		made, err := generate(files, c.prefix)
		if err != nil {
			t.Fatal(err)
		}
		if len(made) < c.files {
			t.Fatalf("only %d files are generated in %s", len(made), c.dir)
		}
		for name, text := range made { // in any order: each is independent
			if have, err := os.ReadFile(filepath.Join(c.dir, name)); err != nil || !bytes.Equal(have, text) {
				t.Errorf("%s/%s is not what its .proto file says (run `make proto`): %v", c.dir, name, err)
			}
		}
		there, err := filepath.Glob(filepath.Join(c.dir, "*.pb.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range there {
			if _, is := made[filepath.Base(name)]; !is {
				t.Errorf("%s is generated of nothing any more (run `make proto`)", name)
			}
		}
	}
}

// A method without a rule, or a method that neither can be sent again nor says so, is not
// generated.
func TestBadMethodsAreRefused(t *testing.T) {
	for _, c := range []struct{ name, method, request, want string }{
		{"good", "option idempotency_level = NO_SIDE_EFFECTS; option (rule) = {roles: [ROLE_ADMIN]};", "", ""},
		{"good with an id", "option (rule) = {roles: [ROLE_ADMIN]};", "uint64 request_id = 1;", ""},
		{"good with a right", "option idempotency_level = IDEMPOTENT; option (rule) = {roles: [ROLE_ADMIN], right: RIGHT_READ};", "VolumeRef volume = 1;", ""},
		{"good with a right on a group", "option idempotency_level = IDEMPOTENT; option (rule) = {roles: [ROLE_ADMIN], right: RIGHT_READ};", "GroupRef group = 1;", ""},
		{"no rule", "option idempotency_level = NO_SIDE_EFFECTS;", "", "which roles may call it"},
		{"no roles", "option idempotency_level = NO_SIDE_EFFECTS; option (rule) = {right: RIGHT_READ};", "VolumeRef volume = 1;", "which roles may call it"},
		{"a right on nothing", "option idempotency_level = NO_SIDE_EFFECTS; option (rule) = {roles: [ROLE_ADMIN], right: RIGHT_READ};", "string volume = 1;", "names no VolumeRef"},
		{"a change", "option (rule) = {roles: [ROLE_ADMIN]};", "", "request_id"},
	} {
		dir := t.TempDir()
		for _, name := range []string{"rights.proto", "refs.proto", "errors.proto"} {
			b, err := os.ReadFile(filepath.Join("..", name))
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		text := `syntax = "proto3";
package penstock.admin.v1;
import "penstock/admin/v1/refs.proto";
import "penstock/admin/v1/rights.proto";
option go_package = "penstock.io/penstock/meta/admin";
service S {
  rpc Do(Q) returns (A) { ` + c.method + ` }
}
message Q { ` + c.request + ` }
message A { VolumeRef unused = 1; }
`
		if err := os.WriteFile(filepath.Join(dir, "s.proto"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		files, err := compile(dir, admin)
		if err == nil {
			err = check(files)
		}
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
}
