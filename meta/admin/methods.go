package admin

import (
	"fmt"
	"math/rand/v2"
	"sync"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
)

// Method is what the service definition says of one.
type Method struct {
	// Name is as it stands in a request: "/penstock.admin.v1.Nodes/ListNodes".
	Name string
	// Rule says who may call it.
	Rule *Rule
	// Reads: it changes nothing.
	Reads bool
	// Long: its answer may take long though the server is well.
	Long bool
	// Resend: it may be sent again when its answer is lost, since it reads, or is
	// idempotent, or its request has a request_id by which the server knows it again.
	Resend bool

	output    protoreflect.MessageType
	requestID protoreflect.FieldDescriptor // nil: there is none
}

// methods has each method of the API by its name. The generator has seen that each has a rule.
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

// MethodOf finds a method of the API; nil if there is none of the name.
func MethodOf(name string) *Method { return methods()[name] }

// Methods gives all methods of the API, by name.
func Methods() map[string]*Method { return methods() }

// NewAnswer makes an empty answer.
func (m *Method) NewAnswer() proto.Message { return m.output.New().Interface() }

// NameRequest gives a request an id, if it is to have one and has none: sent again, it is
// done once.
func (m *Method) NameRequest(request proto.Message) {
	if m.requestID == nil {
		return
	}
	if r := request.ProtoReflect(); r.Get(m.requestID).Uint() == 0 {
		r.Set(m.requestID, protoreflect.ValueOfUint64(rand.Uint64()|1))
	}
}

// VolumesOf gives the volumes that a request names.
func VolumesOf(request proto.Message) (all []*VolumeRef) {
	m := request.ProtoReflect()
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if x := f.Message(); x == nil || x.FullName() != "penstock.admin.v1.VolumeRef" || !m.Has(f) {
			continue
		}
		if !f.IsList() {
			all = append(all, m.Get(f).Message().Interface().(*VolumeRef))
			continue
		}
		l := m.Get(f).List()
		for j := range l.Len() {
			all = append(all, l.Get(j).Message().Interface().(*VolumeRef))
		}
	}
	return all
}
