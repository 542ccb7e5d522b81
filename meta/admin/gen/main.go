// Command gen owns the generated files of meta/admin and stream/ingest. The command compiles the
// .proto files of a folder, refuses an administrative service that breaks the rules of the house,
// and has the generators that go.mod pins write the Go files. No protoc is needed:
//
//	gen [DIR [PREFIX]]    as `make proto` does
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/bufbuild/protocompile"
	"github.com/bufbuild/protocompile/linker"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/pluginpb"
)

// admin is the prefix of the administrative API. A prefix is the folder by which other
// .proto files import the files.
const admin = "penstock/admin/v1/"

func main() {
	dir, prefix := ".", admin
	if len(os.Args) > 1 {
		dir = os.Args[1]
	}
	if len(os.Args) > 2 {
		prefix = os.Args[2]
	}
	if err := run(dir, prefix); err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}

// run writes the generated files of a folder, and removes files that are no longer
// generated.
func run(dir, prefix string) error {
	files, err := compile(dir, prefix)
	if err != nil {
		return err
	}
	if prefix == admin {
		if err := check(files); err != nil {
			return err
		}
	}
	made, err := generate(files, prefix)
	if err != nil {
		return err
	}
	old, err := filepath.Glob(filepath.Join(dir, "*.pb.go"))
	if err != nil {
		return err
	}
	for _, name := range old {
		if _, still := made[filepath.Base(name)]; !still {
			if err := os.Remove(name); err != nil {
				return err
			}
		}
	}
	for name, text := range made { // in any order: each for itself
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o666); err != nil {
			return err
		}
	}
	return nil
}

// compile reads the .proto files of a folder.
func compile(dir, prefix string) (linker.Files, error) {
	names, err := filepath.Glob(filepath.Join(dir, "*.proto"))
	if err != nil {
		return nil, err
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("%s has no .proto files", dir)
	}
	slices.Sort(names)
	for i, name := range names {
		names[i] = prefix + filepath.Base(name)
	}
	c := protocompile.Compiler{
		SourceInfoMode: protocompile.SourceInfoStandard,
		Resolver: protocompile.WithStandardImports(protocompile.ResolverFunc(func(name string) (protocompile.SearchResult, error) {
			base, ok := strings.CutPrefix(name, prefix)
			if !ok {
				return protocompile.SearchResult{}, fmt.Errorf("%s: %w", name, os.ErrNotExist)
			}
			text, err := os.ReadFile(filepath.Join(dir, base))
			return protocompile.SearchResult{Source: bytes.NewReader(text)}, err
		})),
	}
	return c.Compile(context.Background(), names...)
}

// ruleField is the number of the option (penstock.admin.v1.rule) of methods.
const ruleField = 50816

// check refuses services that break these rules:
//
//   - each method has a rule, with at least one role;
//   - a method whose rule has a right names a volume or a group in its request;
//   - a method that changes something is idempotent, has a request_id, or says in its
//     comment that a call whose answer is lost "is not sent again".
func check(files linker.Files) error {
	var errs []error
	for _, f := range files {
		for i := range f.Services().Len() {
			s := f.Services().Get(i)
			for j := range s.Methods().Len() {
				if err := checkMethod(f, s.Methods().Get(j)); err != nil {
					errs = append(errs, fmt.Errorf("%s: %w", s.Methods().Get(j).FullName(), err))
				}
			}
		}
	}
	return errors.Join(errs...)
}

func checkMethod(f protoreflect.FileDescriptor, m protoreflect.MethodDescriptor) error {
	options := m.Options().(*descriptorpb.MethodOptions)
	roles, right, err := ruleOf(options)
	switch {
	case err != nil:
		return err
	case roles == 0:
		return errors.New("it has no (rule) with roles: say which roles may call it")
	case right && !namesVolume(m.Input()):
		return errors.New("its rule has a right, and its request names no VolumeRef and no GroupRef")
	case options.GetIdempotencyLevel() != descriptorpb.MethodOptions_IDEMPOTENCY_UNKNOWN:
		return nil
	case m.Input().Fields().ByName("request_id") != nil:
		return nil
	case strings.Contains(strings.Join(strings.Fields(f.SourceLocations().ByDescriptor(m).LeadingComments), " "), "is not sent again"):
		return nil
	}
	return errors.New("it changes something: give its request a request_id, say that it is IDEMPOTENT, or in its comment that a call whose answer is lost is not sent again")
}

// ruleOf reads a method's rule from bytes: the generator must not need its own output.
func ruleOf(options *descriptorpb.MethodOptions) (roles int, right bool, err error) {
	b, err := proto.Marshal(options)
	if err != nil {
		return 0, false, err
	}
	walk := func(b []byte, each func(protowire.Number, []byte)) error {
		for len(b) > 0 {
			n, typ, k := protowire.ConsumeTag(b)
			if k < 0 {
				return protowire.ParseError(k)
			}
			b = b[k:]
			if k = protowire.ConsumeFieldValue(n, typ, b); k < 0 {
				return protowire.ParseError(k)
			}
			v := b[:k]
			if typ == protowire.BytesType {
				v, _ = protowire.ConsumeBytes(v)
			}
			each(n, v)
			b = b[k:]
		}
		return nil
	}
	var inner error
	err = walk(b, func(n protowire.Number, v []byte) {
		if n != ruleField {
			return
		}
		inner = walk(v, func(n protowire.Number, v []byte) {
			switch n {
			case 1:
				roles += max(1, len(v))
			case 2:
				right = true
			}
		})
	})
	return roles, right, errors.Join(err, inner)
}

// namesVolume reports whether a message has a field that names a volume or a group of
// volumes.
func namesVolume(m protoreflect.MessageDescriptor) bool {
	for i := range m.Fields().Len() {
		if x := m.Fields().Get(i).Message(); x != nil && (x.FullName() == "penstock.admin.v1.VolumeRef" || x.FullName() == "penstock.admin.v1.GroupRef") {
			return true
		}
	}
	return false
}

// generators are the programs that write Go files: tools of go.mod.
var generators = []string{"protoc-gen-go", "protoc-gen-go-grpc"}

// generate gives the text of the generated files by name.
func generate(files linker.Files, prefix string) (map[string][]byte, error) {
	q := &pluginpb.CodeGeneratorRequest{Parameter: proto.String("paths=source_relative")}
	seen := map[string]bool{}
	var add func(f protoreflect.FileDescriptor)
	add = func(f protoreflect.FileDescriptor) {
		if seen[f.Path()] {
			return
		}
		seen[f.Path()] = true
		for i := range f.Imports().Len() {
			add(f.Imports().Get(i).FileDescriptor)
		}
		q.ProtoFile = append(q.ProtoFile, protodesc.ToFileDescriptorProto(f))
	}
	for _, f := range files {
		q.FileToGenerate = append(q.FileToGenerate, f.Path())
		add(f)
	}
	in, err := proto.Marshal(q)
	if err != nil {
		return nil, err
	}
	made := map[string][]byte{}
	for _, tool := range generators {
		cmd := exec.Command("go", "tool", tool)
		cmd.Stdin, cmd.Stderr = bytes.NewReader(in), os.Stderr
		out, err := cmd.Output()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", tool, err)
		}
		var re pluginpb.CodeGeneratorResponse
		if err := proto.Unmarshal(out, &re); err != nil {
			return nil, fmt.Errorf("%s: %w", tool, err)
		}
		if re.Error != nil {
			return nil, fmt.Errorf("%s: %s", tool, re.GetError())
		}
		for _, f := range re.File {
			made[strings.TrimPrefix(f.GetName(), prefix)] = []byte(f.GetContent())
		}
	}
	return made, nil
}
