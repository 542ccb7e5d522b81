package admin

import (
	"fmt"
	"math/rand/v2"
	"sync"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"

	"penstock.io/penstock/meta"
)

// Method describes a method as declared in the service definition.
type Method struct {
	// Name is the name in requests: "/penstock.admin.v1.Nodes/ListNodes".
	Name string
	// Rule lists the roles and rights required of callers.
	Rule *Rule
	// Reads: the method changes nothing.
	Reads bool
	// Long: the answer may take long although the server is healthy.
	Long bool
	// WhileRestoring: a server answers also while the cluster's records are being restored.
	WhileRestoring bool
	// Resend: the client may send a request again if the answer is lost, since the method
	// reads or is idempotent, or the server recognizes the request by its request_id.
	Resend bool
	// Done is the kind of error of a request sent again that means that the server executed the
	// request the first time; KindOK: no kind.
	Done meta.Kind

	output    protoreflect.MessageType
	requestID protoreflect.FieldDescriptor // nil: no request_id
}

// methods maps names to the methods of the API. It panics if a method has no rule.
var methods = sync.OnceValue(func() map[string]*Method {
	all := map[string]*Method{}
	protoregistry.GlobalFiles.RangeFilesByPackage("penstock.admin.v1", func(f protoreflect.FileDescriptor) bool {
		for i := range f.Services().Len() {
			s := f.Services().Get(i)
			for j := range s.Methods().Len() {
				d := s.Methods().Get(j)
				m := &Method{Name: fmt.Sprintf("/%s/%s", s.FullName(), d.Name()), requestID: d.Input().Fields().ByName("request_id")}
				options := d.Options().(*descriptorpb.MethodOptions)
				m.Rule = proto.GetExtension(options, E_Rule).(*Rule)
				if len(m.Rule.GetRoles()) == 0 {
					panic("admin: nobody may call " + m.Name)
				}
				m.Reads = options.GetIdempotencyLevel() == descriptorpb.MethodOptions_NO_SIDE_EFFECTS
				m.Long = proto.GetExtension(options, E_Long).(bool)
				m.Done = meta.Kind(proto.GetExtension(options, E_Done).(Kind))
				m.WhileRestoring = proto.GetExtension(options, E_WhileRestoring).(bool)
				m.Resend = options.GetIdempotencyLevel() != descriptorpb.MethodOptions_IDEMPOTENCY_UNKNOWN || m.requestID != nil
				output, err := protoregistry.GlobalTypes.FindMessageByName(d.Output().FullName())
				if err != nil {
					panic("admin: a generated message is registered: " + err.Error())
				}
				m.output = output
				all[m.Name] = m
			}
		}
		return true
	})
	return all
})

// MethodOf finds a method of the API by name; nil: no such method.
func MethodOf(name string) *Method { return methods()[name] }

// Methods returns all methods of the API, by name.
func Methods() map[string]*Method { return methods() }

// DoneBefore reports whether the error of a request that was sent again means that the server
// executed the request the first time.
func (m *Method) DoneBefore(err error) bool {
	return m.Done != meta.KindOK && meta.KindOf(err) == m.Done
}

// NewAnswer makes an empty answer.
func (m *Method) NewAnswer() proto.Message { return m.output.New().Interface() }

// NameRequest sets the request_id of a request, if the method has the field and the field is
// zero. The server executes a request once even if the client sends the request again.
func (m *Method) NameRequest(request proto.Message) {
	if m.requestID == nil {
		return
	}
	if r := request.ProtoReflect(); r.Get(m.requestID).Uint() == 0 {
		r.Set(m.requestID, protoreflect.ValueOfUint64(rand.Uint64()|1))
	}
}

// VolumesOf returns the volumes named by a request.
func VolumesOf(request proto.Message) []*VolumeRef { return namedBy[*VolumeRef](request) }

// GroupsOf returns the groups of snapshots named by a request.
func GroupsOf(request proto.Message) []*GroupRef { return namedBy[*GroupRef](request) }

// namedBy returns the references of one kind in a request.
func namedBy[Ref proto.Message](request proto.Message) (all []Ref) {
	var kind Ref
	m := request.ProtoReflect()
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if x := f.Message(); x == nil || x.FullName() != kind.ProtoReflect().Descriptor().FullName() || !m.Has(f) {
			continue
		}
		if !f.IsList() {
			all = append(all, m.Get(f).Message().Interface().(Ref))
			continue
		}
		l := m.Get(f).List()
		for j := range l.Len() {
			all = append(all, l.Get(j).Message().Interface().(Ref))
		}
	}
	return all
}
