package admin

import (
	"fmt"
	"reflect"
	"strings"
	"time"
	"unicode"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
)

// Say fills a message of the API from a struct of this module, field by field, by name. The
// name of a struct field is its tag pb, else its tag json, else its Go name in lower case with
// underscores. Times become Timestamps and durations Durations; the zero time is absent. A
// word becomes the enum value ending in the word: "active" is NODE_ACTIVE; a certificate's
// role becomes a Role. Say leaves fields alone that only one side has: Unsaid lists such
// fields, for tests.
//
// Two fields of one name that can't be translated are a fault of the program: Say panics.
func Say(to proto.Message, from any) {
	say(to.ProtoReflect(), reflect.Indirect(reflect.ValueOf(from)))
}

// Hear fills the struct that to points to from a message, as the reverse of Say.
func Hear(to any, from proto.Message) {
	hear(reflect.ValueOf(to).Elem(), from.ProtoReflect())
}

// Unsaid lists the fields of a message and of a struct without a partner, including fields of
// nested messages and structs.
func Unsaid(m proto.Message, s any) []string {
	return unsaid(m.ProtoReflect().Descriptor(), reflect.TypeOf(s), "", map[reflect.Type]bool{})
}

var (
	timeType     = reflect.TypeFor[time.Time]()
	metaTimeType = reflect.TypeFor[meta.Time]()
	durationType = reflect.TypeFor[time.Duration]()
	roleType     = reflect.TypeFor[peer.Role]()
)

// fieldName returns the message name of a struct field; empty: the field has no partner.
func fieldName(f reflect.StructField) string {
	if !f.IsExported() {
		return ""
	}
	for _, tag := range []string{"pb", "json"} {
		if name, _, _ := strings.Cut(f.Tag.Get(tag), ","); name == "-" {
			return ""
		} else if name != "" {
			return name
		}
	}
	var b strings.Builder
	runes := []rune(f.Name)
	for i, r := range runes {
		if unicode.IsUpper(r) && i > 0 && (unicode.IsLower(runes[i-1]) || i+1 < len(runes) && unicode.IsLower(runes[i+1])) {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}

// eachField calls fn for each field of a struct with a partner in a message.
func eachField(m protoreflect.MessageDescriptor, s reflect.Type, fn func(index int, f protoreflect.FieldDescriptor)) {
	for i := range s.NumField() {
		if name := fieldName(s.Field(i)); name != "" {
			if f := m.Fields().ByName(protoreflect.Name(name)); f != nil {
				fn(i, f)
			}
		}
	}
}

func say(m protoreflect.Message, s reflect.Value) {
	eachField(m.Descriptor(), s.Type(), func(i int, f protoreflect.FieldDescriptor) {
		v := s.Field(i)
		switch {
		case f.IsMap():
			if v.Len() == 0 {
				return
			}
			to := m.Mutable(f).Map()
			for it := v.MapRange(); it.Next(); {
				to.Set(sayOne(f.MapKey(), it.Key()).MapKey(), sayOne(f.MapValue(), it.Value()))
			}
		case f.IsList():
			if v.Len() == 0 {
				return
			}
			to := m.Mutable(f).List()
			for j := range v.Len() {
				to.Append(sayOne(f, v.Index(j)))
			}
		case v.IsZero(): // absent: the zero value of the message field
		default:
			m.Set(f, sayOne(f, v))
		}
	})
}

func sayOne(f protoreflect.FieldDescriptor, v reflect.Value) protoreflect.Value {
	switch {
	case v.Type() == timeType:
		return protoreflect.ValueOfMessage(timestamppb.New(v.Interface().(time.Time)).ProtoReflect())
	case v.Type() == metaTimeType && f.Message() != nil:
		return protoreflect.ValueOfMessage(timestamppb.New(time.Unix(0, v.Int())).ProtoReflect())
	case v.Type() == durationType && f.Message() != nil:
		return protoreflect.ValueOfMessage(durationpb.New(time.Duration(v.Int())).ProtoReflect())
	case v.Type() == roleType && f.Kind() == protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(RoleOf(peer.Role(v.String())).Number())
	case v.Kind() == reflect.Pointer:
		return sayOne(f, v.Elem())
	}
	switch f.Kind() {
	case protoreflect.MessageKind:
		sub := newMessage(f.Message())
		say(sub, v)
		return protoreflect.ValueOfMessage(sub)
	case protoreflect.EnumKind:
		if v.Kind() != reflect.String {
			return protoreflect.ValueOfEnum(protoreflect.EnumNumber(number(v)))
		}
		for i := range f.Enum().Values().Len() {
			if x := f.Enum().Values().Get(i); wordOf(x) == v.String() {
				return protoreflect.ValueOfEnum(x.Number())
			}
		}
		return protoreflect.ValueOfEnum(0) // the API does not know the word yet
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(strings.ToValidUTF8(v.String(), "\uFFFD"))
	case protoreflect.BytesKind:
		if v.Kind() == reflect.String { // a name, which may be no UTF-8
			return protoreflect.ValueOfBytes([]byte(v.String()))
		}
		return protoreflect.ValueOfBytes(v.Bytes())
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(v.Bool())
	case protoreflect.DoubleKind:
		return protoreflect.ValueOfFloat64(v.Float())
	case protoreflect.Uint64Kind:
		return protoreflect.ValueOfUint64(uint64(number(v)))
	case protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32(uint32(number(v)))
	case protoreflect.Int64Kind:
		return protoreflect.ValueOfInt64(number(v))
	}
	panic(fmt.Sprintf("admin: %s can't be said of a %s", f.FullName(), v.Type()))
}

// number returns an integer of any kind in 64 bits.
func number(v reflect.Value) int64 {
	if v.CanUint() {
		return int64(v.Uint())
	}
	return v.Int()
}

// wordOf returns an enum value in words: NODE_ACTIVE is "active", SNAPSHOT_ROLLING_BACK
// "rolling back". Values of Users have hyphens: "as-is".
func wordOf(v protoreflect.EnumValueDescriptor) string {
	between := " "
	if v.Parent().FullName() == Users(0).Descriptor().FullName() {
		between = "-"
	}
	_, word, _ := strings.Cut(string(v.Name()), "_")
	return strings.ReplaceAll(strings.ToLower(word), "_", between)
}

func hear(s reflect.Value, m protoreflect.Message) {
	eachField(m.Descriptor(), s.Type(), func(i int, f protoreflect.FieldDescriptor) {
		if !m.Has(f) {
			return
		}
		v := s.Field(i)
		switch {
		case f.IsMap():
			v.Set(reflect.MakeMap(v.Type()))
			m.Get(f).Map().Range(func(k protoreflect.MapKey, x protoreflect.Value) bool {
				key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
				hearOne(key, f.MapKey(), k.Value())
				hearOne(value, f.MapValue(), x)
				v.SetMapIndex(key, value)
				return true
			})
		case f.IsList():
			l := m.Get(f).List()
			v.Set(reflect.MakeSlice(v.Type(), l.Len(), l.Len()))
			for j := range l.Len() {
				hearOne(v.Index(j), f, l.Get(j))
			}
		default:
			hearOne(v, f, m.Get(f))
		}
	})
}

func hearOne(v reflect.Value, f protoreflect.FieldDescriptor, x protoreflect.Value) {
	switch {
	case v.Type() == timeType:
		v.Set(reflect.ValueOf(x.Message().Interface().(*timestamppb.Timestamp).AsTime()))
		return
	case v.Type() == metaTimeType && f.Message() != nil:
		v.SetInt(x.Message().Interface().(*timestamppb.Timestamp).AsTime().UnixNano())
		return
	case v.Type() == durationType && f.Message() != nil:
		v.SetInt(int64(x.Message().Interface().(*durationpb.Duration).AsDuration()))
		return
	case v.Type() == roleType && f.Kind() == protoreflect.EnumKind:
		v.SetString(string(Role(x.Enum()).Peer()))
		return
	case v.Kind() == reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		hearOne(v.Elem(), f, x)
		return
	}
	switch f.Kind() {
	case protoreflect.MessageKind:
		hear(v, x.Message())
	case protoreflect.EnumKind:
		if v.Kind() != reflect.String {
			setNumber(v, int64(x.Enum()))
		} else if d := f.Enum().Values().ByNumber(x.Enum()); d != nil && d.Number() != 0 {
			v.SetString(wordOf(d))
		}
	case protoreflect.StringKind:
		v.SetString(x.String())
	case protoreflect.BytesKind:
		if v.Kind() == reflect.String {
			v.SetString(string(x.Bytes()))
		} else {
			v.SetBytes(x.Bytes())
		}
	case protoreflect.BoolKind:
		v.SetBool(x.Bool())
	case protoreflect.DoubleKind:
		v.SetFloat(x.Float())
	case protoreflect.Uint64Kind, protoreflect.Uint32Kind:
		setNumber(v, int64(x.Uint()))
	case protoreflect.Int64Kind:
		setNumber(v, x.Int())
	default:
		panic(fmt.Sprintf("admin: a %s can't hear %s", v.Type(), f.FullName()))
	}
}

func setNumber(v reflect.Value, n int64) {
	if v.CanUint() {
		v.SetUint(uint64(n))
	} else {
		v.SetInt(n)
	}
}

// unsaid is Unsaid for the fields below a path.
func unsaid(m protoreflect.MessageDescriptor, s reflect.Type, path string, seen map[reflect.Type]bool) (l []string) {
	if seen[s] {
		return nil
	}
	seen[s] = true
	paired := map[protoreflect.Name]bool{}
	for i := range s.NumField() {
		sf := s.Field(i)
		name := fieldName(sf)
		if name == "" {
			continue
		}
		f := m.Fields().ByName(protoreflect.Name(name))
		if f == nil {
			l = append(l, path+"."+sf.Name)
			continue
		}
		paired[f.Name()] = true
		t := sf.Type
		if f.IsMap() {
			f, t = f.MapValue(), t.Elem()
		} else if f.IsList() {
			t = t.Elem()
		}
		if t.Kind() == reflect.Pointer {
			t = t.Elem()
		}
		if f.Message() != nil && t.Kind() == reflect.Struct && t != timeType {
			l = append(l, unsaid(f.Message(), t, path+"."+name, seen)...)
		}
	}
	for i := range m.Fields().Len() {
		if f := m.Fields().Get(i); !paired[f.Name()] {
			l = append(l, path+"."+string(f.Name()))
		}
	}
	return l
}

// newMessage makes an empty message of the API.
func newMessage(d protoreflect.MessageDescriptor) protoreflect.Message {
	t, err := protoregistry.GlobalTypes.FindMessageByName(d.FullName())
	if err != nil {
		panic("admin: a generated message is registered: " + err.Error())
	}
	return t.New()
}
